"""Torch's reading and writing by fsspec URL, which it keeps in a private module."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader

from axonlaunch.checkpoint.storage import is_remote

__all__ = ["FileSystem", "source"]


def source(folder: Path) -> FileSystemReader:
    """Return what reads a checkpoint's folder, here or elsewhere."""
    if is_remote(folder):
        return FsspecReader(str(folder), use_listings_cache=False)
    return FileSystemReader(folder)
