"""What says that memory has run out: torch's own error, and the texts of the libraries under it."""

from __future__ import annotations

import errno

import torch

_PHRASES = (
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "out of memory",  # of CUDA, also as NCCL repeats it
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that a device, or its host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)
