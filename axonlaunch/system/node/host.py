"""Memory, cores and private folders of this node, without torch."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int:
    """Return the physical memory of this node, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes() -> int:
    """Return the bytes available without swapping; all physical memory if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return memory_bytes()
    return int(kib) << 10


def threads(*, ranks: int) -> int:
    """Return the number of threads for each rank: an equal share of this process's cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def private_folder(path: Path) -> Path:
    """Create a folder, if it does not exist, that only this user can enter.

    Raises:
        OSError: The folder can't be created or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path
