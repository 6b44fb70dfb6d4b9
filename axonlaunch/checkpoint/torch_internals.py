"""Collects the private names of torch that the checkpoint package uses.

``tests/house/test_private_names.py`` checks each name; if torch moves one, the fix belongs in this
file. ``StoragePlace`` is pickled under torch's name in ``.metadata``.
"""

from __future__ import annotations

from torch._utils import _rebuild_tensor_v3 as rebuild_tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as RemoteFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import _OverlappingCpuLoader as OverlappingCpuLoader
from torch.distributed.checkpoint.filesystem import _SerialCpuLoader as SerialCpuLoader
from torch.distributed.checkpoint.filesystem import _StorageInfo as StoragePlace
from torch.distributed.checkpoint.filesystem import _TensorLoader as TensorLoader

__all__ = [
    "FsspecReader",
    "OverlappingCpuLoader",
    "RemoteFileSystem",
    "SerialCpuLoader",
    "StoragePlace",
    "TensorLoader",
    "rebuild_tensor",
]
