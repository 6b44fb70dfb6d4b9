"""Looks for a driver of GPUs without importing torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

_LIBRARY = "libcuda.so.1"
"""Library that NVIDIA's driver installs and CUDA loads."""
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of the drivers of NVIDIA and AMD, and of GPUs in WSL 2."""


def has_gpu_driver() -> bool:
    """Return whether this system has a driver with which torch could use a GPU.

    Source: NVIDIA, "CUDA Driver API", for the library; AMD, "ROCm documentation", "Restricting GPU
    access", for ``/dev/kfd``.
    """
    return any(Path(device).exists() for device in _DEVICES) or _can_be_loaded(_LIBRARY)


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
