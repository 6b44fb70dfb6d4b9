"""Builds the bytes that turn a tensor's raw bytes into a file that ``torch.load`` reads.

``torch.distributed.checkpoint.FileSystemReader`` reads each tensor with ``torch.load``. Of the two
formats of ``torch.save`` the older one ends with the raw bytes of the storage, so a header in front
of them is enough: nothing follows the bytes, and no second checksum is computed over them.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from axonlaunch.checkpoint.torch_internals import rebuild_tensor

_PICKLE_PROTOCOL = 2
_STORAGE_KEY = "0"
_SYSTEM = {
    "protocol_version": PROTOCOL_VERSION,
    "little_endian": sys.byteorder == "little",
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


@lru_cache(maxsize=4096)
def archive_header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Return the header that precedes the raw bytes of a contiguous tensor in a torch file.

    Example:
        torch.load(io.BytesIO(archive_header(torch.float32, (2,)) + bytes(8)))  # two zeros
    """
    size = torch.Size(shape)
    nbytes = size.numel() * dtype.itemsize
    stream = io.BytesIO()
    for value in (MAGIC_NUMBER, PROTOCOL_VERSION, _SYSTEM):
        pickle.dump(value, stream, protocol=_PICKLE_PROTOCOL)
    _Pickler(stream, protocol=_PICKLE_PROTOCOL).dump(_Tensor(dtype, size, _Storage(nbytes)))
    pickle.dump([_STORAGE_KEY], stream, protocol=_PICKLE_PROTOCOL)
    stream.write(nbytes.to_bytes(8, "little"))
    return stream.getvalue()


class _Storage:
    """Stands for a storage, whose bytes follow the header."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Tensor:
    """Pickles as a contiguous tensor of the given storage."""

    def __init__(self, dtype: torch.dtype, size: torch.Size, storage: _Storage) -> None:
        self._dtype, self._size, self._storage = dtype, size, storage

    def __reduce__(self) -> tuple[Any, ...]:
        stride = torch.empty(self._size, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        size, requires_grad = tuple(self._size), False
        return rebuild_tensor, (self._storage, 0, size, stride, requires_grad, hooks, self._dtype)


class _Pickler(pickle.Pickler):
    """Writes storages as references, in the form that ``torch.load`` resolves."""

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, _Storage):
            return None
        # A storage of bytes serves every dtype: the tensor that is built from it has its own.
        return ("storage", torch.ByteStorage, _STORAGE_KEY, "cpu", obj.nbytes, None)
