"""Page-locked host memory of its size to a page, for what stays in it: a GPU copies to and from it.

torch's own allocator of such memory rounds every block up to a power of two, so that 33 MiB take
64 (``AllocatorSettings.page_locked``). It has a setting against that, with which torch 2.13 may
hand out a freed block that is too small (pytorch/pytorch#192722).
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process


def page_locked(like: Tensor) -> Tensor:
    """Return a tensor without values, whose memory is unlocked when it is freed.

    It has pages of its own: the driver locks whole ones, and none twice.

    Args:
        like: Has its shape, strides and dtype, and no gaps; it may be on the meta device.

    Raises:
        torch.cuda.CudaError: The driver can't lock so much.
    """
    num_bytes = like.numel() * like.itemsize
    if not num_bytes:
        return torch.empty_like(like, device="cpu")
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8)
    pages = memory[-memory.data_ptr() % mmap.PAGESIZE :][:size]
    runtime: Any = torch.cuda.cudart()
    address = pages.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, _PORTABLE)))
    # Of the storage: a tensor made from this one, as DTensor detaches it, outlives it.
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address)
    return pages[:num_bytes].view(like.dtype).as_strided(like.shape, like.stride())
