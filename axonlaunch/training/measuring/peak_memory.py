"""Measures this process's memory on its device, as reported by the system or the allocator.

Memory is estimated in ``planning``.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from axonlaunch.engines.engine import Engine
from axonlaunch.system.node import host, limits


class PeakWatch(Protocol):
    """Measures the peak memory of a run."""

    def storing(self) -> AbstractContextManager[Any]:
        """Return a context for all code that allocates storage of the engine."""

    def step(self, engine: Engine) -> AbstractContextManager[None]:
        """Return a context for one training step."""

    def peak_bytes(self) -> int | None:
        """Return the peak memory; None if unknown."""


class DevicePeak:
    """The peak reported by an accelerator's allocator, from the second step on.

    Earlier peaks include one-time work, such as loading weights and trying out kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0

    def storing(self) -> AbstractContextManager[Any]:
        """Return an empty context, because the allocator tracks all memory."""
        return nullcontext()

    def step(self, engine: Engine) -> AbstractContextManager[None]:
        """Reset the peak before the second step."""
        del engine
        self._steps += 1
        if self._steps == 2 and self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        return nullcontext()

    def peak_bytes(self) -> int | None:
        """Return the peak of allocated bytes; None on a CPU, which has no such allocator."""
        return None if self._device.type == "cpu" else peak_memory_bytes(self._device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far.

    On an accelerator this is the peak of bytes allocated for tensors. On a CPU it is the peak
    resident set of this process, including the interpreter and libraries.
    """
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_to_rank(sharing: int) -> int:
    """Return the bytes of device memory available to one rank, including those it already uses.

    Args:
        sharing: Number of ranks that share the host's memory, if there is no CUDA device.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()
    if not Path("/proc/meminfo").exists():
        return host.memory_bytes() // sharing
    pages = Path("/proc/self/statm").read_text().split()[:2]
    mapped, resident = (int(number) * os.sysconf("SC_PAGE_SIZE") for number in pages)
    free = host.free_memory_bytes() // sharing
    if (limit := limits.address_space()) is not None:
        free = min(free, max(0, limit - mapped))
    return free + resident
