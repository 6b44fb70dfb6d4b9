"""What the machine itself has, told without torch: parents that start ranks ask too."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """Return the physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
