"""What this process holds of its device's memory, as the system or the allocator reports it.

It measures; ``planning`` is where memory is estimated.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from axonlaunch.engines.base import Engine
from axonlaunch.system import host


class PeakWatch(Protocol):
    """Finds the peak of a run."""

    def storing(self) -> AbstractContextManager[Any]:
        """Surround whatever allocates the engine's storage."""

    def step(self, engine: Engine) -> AbstractContextManager[None]:
        """Surround a step of the run."""

    def peak_bytes(self) -> int | None:
        """Return the most that was held; None where that is not known."""


class DevicePeak:
    """The peak that an accelerator's allocator reports, from the second step on.

    Until then it is that of what is done once: weights are read, kernels are tried out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0

    def storing(self) -> AbstractContextManager[Any]:
        """Do nothing: the allocator watches by itself."""
        return nullcontext()

    def step(self, engine: Engine) -> AbstractContextManager[None]:
        """Forget, before the second step, what was held until then."""
        del engine
        self._steps += 1
        if self._steps == 2 and self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        return nullcontext()

    def peak_bytes(self) -> int | None:
        """Return what the allocator gave to tensors; None on a CPU, which has none to ask."""
        return None if self._device.type == "cpu" else peak_memory_bytes(self._device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most that was held so far.

    On an accelerator, bytes its allocator gave to tensors; on a CPU, this process's peak resident
    set, the interpreter and libraries included.
    """
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes(sharing: int) -> int:
    """Return what other programs leave of a device's memory to one rank, its own included.

    Args:
        sharing: Ranks that share the host's memory, where there is no device of their own.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()
    if not Path("/proc/meminfo").exists():
        return host.memory_bytes() // sharing
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return host.free_memory_bytes() // sharing + own
