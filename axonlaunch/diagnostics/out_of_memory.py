"""Recognizes out-of-memory errors of torch and of the libraries that it calls."""

from __future__ import annotations

import errno

import torch

_PHRASES = (
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "out of memory",  # from CUDA, directly or through NCCL
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or its host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)
