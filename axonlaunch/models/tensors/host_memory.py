"""Provides host memory for tensors that leave a device and come back.

On a GPU the memory is page-locked once and reused, because locking takes longer than a copy. On a
CPU host and device are one memory, and torch's allocator provides it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from axonlaunch.models.tensors.page_locked import page_locked

_HOST = torch.device("cpu")
_thread = threading.local()


def is_allocating() -> bool:
    """Return whether this thread allocates host memory, so that traces of memory can count it."""
    return getattr(_thread, "is_allocating", False)


@contextmanager
def _allocating() -> Iterator[None]:
    _thread.is_allocating = True
    try:
        yield
    finally:
        _thread.is_allocating = False


class HostBuffers:
    """Host memory for the tensors of one device.

    The caller orders copies: a tensor that was given back is only written after it was read.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without memory.

        Args:
            device: Device of the tensors.
        """
        self._locks = device.type == "cuda"
        self._unused: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor in host memory with the shape, strides and dtype of another one.

        Tensors with gaps in memory get other strides.
        """
        shape = torch.empty_like(like, device="meta")
        if not self._locks:
            with _allocating():
                return torch.empty_like(shape, device=_HOST)
        memory = self._smallest_unused(shape.nbytes)
        return memory[: shape.nbytes].view(shape.dtype).as_strided(shape.shape, shape.stride())

    def _smallest_unused(self, num_bytes: int) -> Tensor:
        """Return unused memory of at least this size; memory that was too small is replaced.

        Therefore inputs of many sizes take only as much memory as the largest of them.
        """
        self._unused.sort(key=lambda memory: memory.nbytes)
        for index, memory in enumerate(self._unused):
            if memory.nbytes >= num_bytes:
                return self._unused.pop(index)
        if self._unused:
            self._unused.pop()
        return page_locked(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))

    def give_back(self, tensor: Tensor) -> None:
        """Provide a tensor's memory for other tensors."""
        if self._locks:
            bytes_of = torch.empty(0, dtype=torch.uint8)
            self._unused.append(bytes_of.set_(tensor.untyped_storage()))
