"""Page-locked host memory of its size to a page, for what stays in it: a GPU copies to and from it.

torch's own allocator of such memory rounds every block up to a power of two, so that 33 MiB take
64 (``AllocatorSettings.page_locked``). It has a setting against that, with which torch 2.13 may
hand out a freed block that is too small (pytorch/pytorch#192722).
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
"""Memory that the driver may still have locked: nobody else may get it."""


def page_locked(like: Tensor) -> Tensor:
    """Return a tensor of zeros, whose memory is freed once nothing refers to it or copies it.

    It has pages of its own: the driver locks whole ones, and none twice. Copies are those of the
    device that is the current one now.

    Args:
        like: Has its shape, strides and dtype, and no gaps; it may be on the meta device.

    Raises:
        RuntimeError: The driver can't lock so much.
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
    # Of the storage: a tensor made from this one, as DTensor detaches it, outlives it.
    storage, device = memory.untyped_storage(), torch.cuda.current_device()
    # What is left when the process ends is the system's to free.
    weakref.finalize(storage, _unlock, pages, address, device).atexit = False
    return memory[:num_bytes].view(like.dtype).as_strided(like.shape, like.stride())


def _unlock(pages: mmap.mmap, address: int, device: int) -> None:
    """Unlock memory after the copies that were launched while something referred to it.

    The host launches copies and goes on, so the last reference may go before they are made.
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
