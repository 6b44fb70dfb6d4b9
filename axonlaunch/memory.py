"""What this process holds of its device's memory, as the system or the allocator tells.

It measures; ``planning`` is where memory will be foretold.
"""

from __future__ import annotations

import os
import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most that was held so far.

    On an accelerator, bytes its allocator gave to tensors; on a CPU, this process's peak resident
    set, the interpreter and libraries included.
    """
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_memory_bytes() -> int:
    """Return this machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
