"""What torch reads a checkpoint with, here or by fsspec URL; its files may be anybody's.

Files that the manifest does not list, or that are no regular files, are not opened. Values that are
not tensors, which torch would unpickle without a look, are refused.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import (
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
)
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystem as LocalFileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future
from zlib_ng.zlib_ng import crc32

from axonlaunch.checkpoint import index, manifest
from axonlaunch.checkpoint.manifest import CorruptCheckpointError
from axonlaunch.checkpoint.storage import is_remote
from axonlaunch.system import files

__all__ = ["FileSystem", "LocalFileSystem", "read_dcp_index", "source"]


def read_dcp_index(folder: Path) -> Metadata:
    """Return the index of a checkpoint, held against its manifest.

    Raises:
        CorruptCheckpointError: Either is not what was written, or says what can't be.
        OSError: They can't be read.
    """
    about = manifest.read_manifest(folder)
    with files.opened(folder / about.index) as stream:
        # A byte more than there should be, so that a file that has grown is found.
        content = stream.read(about.files[about.index].bytes + 1)
    expected = about.files[about.index].crc32
    if expected is not None and crc32(content) != expected:
        raise CorruptCheckpointError(
            f"has an {about.index} that is not what was written (its CRC-32 differs)"
        )
    return index.read_index(content, about.files, pickled=about.format < 3)


class _Guarded(FileSystemReader):
    """Reads the index with a look at what it names."""

    folder: Path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        metadata = read_dcp_index(self.folder)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Regular(LocalFileSystem):
    """Reads regular files of this node, and nothing else."""

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "rb"
        with files.opened(path) as stream:
            yield cast("io.IOBase", stream)


class _Here(_Guarded):
    """Reads from a folder, each file from its beginning to its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Regular()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        where = self.storage_data
        ordered = sorted(plan.items, key=lambda item: where[item.storage_index].offset)
        return super().read_data(replace(plan, items=ordered), planner)


class _Elsewhere(_Guarded, FsspecReader):
    """Reads by URL."""


def source(folder: Path) -> FileSystemReader:
    """Return what reads a checkpoint's folder."""
    source_type: _Guarded
    if is_remote(folder):
        source_type = _Elsewhere(str(folder), use_listings_cache=False)
    else:
        source_type = _Here(folder)
    source_type.folder = folder
    return source_type
