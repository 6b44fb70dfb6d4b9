"""Allocates page-locked host memory, from which a GPU copies directly.

The size is rounded up to a page only. torch's allocator of page-locked memory rounds every block up
to a power of two, so 33 MiB take 64 MiB (``AllocatorSettings.page_locked``). It has a setting that
avoids this, but with that setting torch 2.13 may hand out a freed block that is too small
(pytorch/pytorch#192722).
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_never_freed: list[mmap.mmap] = []
"""Memory that the driver may still have locked; kept so that it is never reused."""


def page_locked(like: Tensor) -> Tensor:
    """Return a tensor of zeros in page-locked memory.

    The tensor gets separate pages, because the driver locks whole pages and locks no page twice.
    The memory is freed when there are no more references to it and all copies on the device that is
    current now have finished.

    Args:
        like: Tensor with the shape, strides and dtype of the result. It must have no gaps in memory
            and may be on the meta device.

    Raises:
        RuntimeError: The driver can't lock this amount of memory.
    """
    num_bytes = like.numel() * like.itemsize
    if not num_bytes:
        return torch.empty_like(like, device="cpu")
    pages = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=_FLAGS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(pages), _PORTABLE)))
    except RuntimeError as error:
        raise RuntimeError(
            f"the driver can't lock {_size(pages)} of host memory: {error}"
        ) from None
    # A finalizer of the storage, not of the tensor: DTensor detaches the tensor, and the detached
    # tensor lives longer than this one.
    storage, device = memory.untyped_storage(), torch.cuda.current_device()
    # The operating system frees the remaining memory at the end of the process.
    weakref.finalize(storage, _unlock, pages, address, device).atexit = False
    return memory[:num_bytes].view(like.dtype).as_strided(like.shape, like.stride())


def _unlock(pages: mmap.mmap, address: int, device: int) -> None:
    """Unlock memory after all copies that use it have finished.

    Copies are asynchronous, so the last reference to the memory may disappear before they finish.
    """
    runtime: Any = torch.cuda.cudart()
    try:
        torch.cuda.synchronize(device)
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))
    except RuntimeError as error:
        _never_freed.append(pages)
        warnings.warn(
            f"{_size(pages)} of page-locked host memory are not freed before the process ends, "
            f"because the driver can't unlock them: {error}",
            stacklevel=2,
        )


def _size(pages: mmap.mmap) -> str:
    return f"{len(pages) / 2**20:.1f} MiB"
