"""Collects the private names of torch that the checkpoint package uses.

``tests/house/test_private_names.py`` checks each name; if torch moves one, the fix belongs in this
file. ``StoragePlace`` is pickled under torch's name in ``.metadata``.
"""

from __future__ import annotations

from torch._utils import _rebuild_tensor_v3 as rebuild_tensor
from torch.distributed.checkpoint._fsspec_filesystem import (
    FileSystem as RemoteFileSystem,
    FsspecReader,
)
from torch.distributed.checkpoint.filesystem import (
    _OverlappingCpuLoader as OverlappingCpuLoader,
    _SerialCpuLoader as SerialCpuLoader,
    _StorageInfo as StoragePlace,
    _TensorLoader as TensorLoader,
)

__all__ = [
    "FsspecReader",
    "OverlappingCpuLoader",
    "RemoteFileSystem",
    "SerialCpuLoader",
    "StoragePlace",
    "TensorLoader",
    "rebuild_tensor",
]
