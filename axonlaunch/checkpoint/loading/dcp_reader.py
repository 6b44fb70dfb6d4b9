"""Reads checkpoints for torch.distributed.checkpoint, from a folder or an fsspec URL.

The files may be hostile. Only regular files that the manifest lists are opened, and nothing is
unpickled. A rank reads only the rows that it needs of each tensor.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem as LocalFileSystem
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future
from zlib_ng.zlib_ng import crc32

from axonlaunch.checkpoint.format import index, manifest
from axonlaunch.checkpoint.format.manifest import CorruptCheckpointError
from axonlaunch.checkpoint.format.storage import is_remote
from axonlaunch.checkpoint.torch_internals import FsspecReader
from axonlaunch.system.storage import files


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return a view of a tensor's host memory as [nbytes] uint8.

    Args:
        tensor: Contiguous tensor of any dtype.
    """
    memory: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return memory


def read_dcp_index(folder: Path) -> Metadata:
    """Return the index of a checkpoint after checking it against the manifest.

    Raises:
        CorruptCheckpointError: The index or the manifest was changed or contradicts the files.
        OSError: A file can't be read.
    """
    return _read_index(folder, manifest.read_manifest(folder))


def _read_index(folder: Path, described: manifest.Manifest) -> Metadata:
    expected = described.files[manifest.INDEX]
    with files.open_regular(folder / manifest.INDEX) as stream:
        content = stream.read(expected.bytes + 1)  # one byte more shows a file that has grown
    if crc32(content) != expected.crc32:
        raise CorruptCheckpointError(
            f"has an {manifest.INDEX} that is not what was written (its CRC-32 differs)"
        )
    return index.read_index(content, described.files)


class _Guarded(FileSystemReader):
    """Checks the index before use, and reads each file in one pass from start to end."""

    folder: Path
    _saved: dict[MetadataIndex, tuple[torch.Size, torch.dtype]]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        metadata = read_dcp_index(self.folder)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        tensors = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
        self._saved = {
            MetadataIndex(name, chunk.offsets): (chunk.sizes, entry.properties.dtype)
            for name, entry in tensors.items()
            for chunk in entry.chunks
        }
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        stored = self.storage_data
        ordered = sorted(plan.items, key=lambda item: stored[item.storage_index].offset)
        by_file: dict[str, list[ReadItem]] = {}
        for item in ordered:
            by_file.setdefault(stored[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for item in items:
                    self._fill(item, planner, stream, *self._saved[item.storage_index])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(
        self,
        item: ReadItem,
        planner: LoadPlanner,
        stream: io.IOBase,
        sizes: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        """Read the rows of an item, directly into its tensor if it needs all of every row."""
        wanted = planner.resolve_tensor(item).detach()
        assert wanted.shape == item.lengths, f"{item.dest_index} has another shape"
        first, count = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
        width = math.prod(sizes[1:]) * dtype.itemsize
        stream.seek(self.storage_data[item.storage_index].offset + first * width)
        is_all = item.lengths[1:] == sizes[1:] and wanted.is_contiguous()
        if is_all and wanted.dtype == dtype and wanted.is_cpu:
            _read_into(wanted, stream)
        else:
            rows = torch.empty((count, *sizes[1:]) if sizes else (), dtype=dtype)
            _read_into(rows, stream)
            inner = zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
            for dim, (start, length) in enumerate(inner, start=1):
                rows = rows.narrow(dim, start, length)
            wanted.copy_(rows)
        planner.commit_tensor(item, wanted)


def _read_into(tensor: Tensor, stream: Any) -> None:
    """Fill a tensor from a stream.

    Raises:
        CorruptCheckpointError: The file ends too early.
    """
    remaining = bytes_of(tensor).data if tensor.numel() else memoryview(b"")
    while len(remaining):
        count = stream.readinto(remaining)
        if not count:
            raise CorruptCheckpointError("has a file that ends too early")
        remaining = remaining[count:]


class _Regular(LocalFileSystem):
    """Opens only regular files of this node."""

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "rb"
        with files.open_regular(path) as stream:
            yield cast("io.IOBase", stream)


class _Local(_Guarded):
    """Reads from a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Regular()


class _Remote(_Guarded, FsspecReader):
    """Reads from an fsspec URL."""


def source(folder: Path) -> FileSystemReader:
    """Return the storage reader of a checkpoint's folder."""
    storage_reader: _Guarded
    if is_remote(folder):
        storage_reader = _Remote(str(folder), use_listings_cache=False)
    else:
        storage_reader = _Local(folder)
    storage_reader.folder = folder
    return storage_reader
