"""What the node itself has, found without torch: parents that start ranks ask too."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int:
    """Return the physical memory of this node, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes() -> int:
    """Return the memory that can be used without swapping, in bytes, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return memory_bytes()
    return int(kib) << 10


def threads(*, ranks: int) -> int:
    """Return how many threads each of some ranks computes with, by this process' cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def private_folder(path: Path) -> Path:
    """Make a folder, unless it is there, that this user alone can enter.

    Raises:
        OSError: It can't be made, or is another user's.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path
