"""What the machine itself has, told without torch: parents that start ranks ask too."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """Return the physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def threads(*, ranks: int) -> int:
    """Return how many threads each of some ranks computes with, by this process' cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
