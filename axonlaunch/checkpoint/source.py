"""What torch reads a checkpoint with, here or by fsspec URL; its index may be anybody's.

Torch keeps the index as a pickle, which could name any function there is; what has no place in an
index is refused. So are values that are not tensors, which torch would unpickle without a look.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
)
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from axonlaunch.checkpoint.storage import is_remote

__all__ = ["FileSystem", "only_tensors", "source"]

INDEX = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
IN_INDEX = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "torch": {
        *("Size", "bool", "uint8", "int8", "int16", "int32", "int64"),
        *("uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    },
    "torch.serialization": {"_get_layout"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}
"""Module -> names that an index may hold."""


class _Index(pickle.Unpickler):
    """Unpickles an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in IN_INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}, which no index needs")
        return super().find_class(module, name)


class _Guarded(FileSystemReader):
    """Reads the index with a look at what it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "rb") as stream:
            index = _Index(stream).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"{INDEX} is no index but {type(index).__name__}")
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Here(_Guarded):
    """Reads from a folder, each file from its beginning to its end."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        where = self.storage_data
        ordered = sorted(plan.items, key=lambda item: where[item.storage_index].offset)
        return super().read_data(replace(plan, items=ordered), planner)


class _Elsewhere(_Guarded, FsspecReader):
    """Reads by URL."""


def source(folder: Path) -> FileSystemReader:
    """Return what reads a checkpoint's folder."""
    if is_remote(folder):
        return _Elsewhere(str(folder), use_listings_cache=False)
    return _Here(folder)


class _OnlyTensors(DefaultLoadPlanner):
    """Takes tensors, which torch unpickles with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor, and not unpickled")


def only_tensors() -> LoadPlanner:
    """Return what plans the reading of a state whose values are all tensors."""
    return _OnlyTensors()
