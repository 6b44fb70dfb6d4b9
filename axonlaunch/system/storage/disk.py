"""Free space and free inodes of the disk of a folder, which need not exist yet."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from axonlaunch.system.text.formatting import GIB, MIB

_FEW_INODES = 100
"""A run creates more files than this within minutes."""


def free_bytes(folder: Path) -> tuple[Path, int]:
    """Return the nearest existing folder, from this one upwards, and its disk's free bytes."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing, shutil.disk_usage(existing).free


def free_inodes(folder: Path) -> int | None:
    """Return how many files and folders can still be created; None if there is no such limit."""
    existing, _ = free_bytes(folder)
    status = os.statvfs(existing)
    return status.f_favail if status.f_files else None


def shortage(folder: Path) -> tuple[str, str]:
    """Return the free space of a full disk, and advice: ``("0.00 GiB free", "free some space")``.

    A disk without free inodes can't take new files even if it has space:
    ``("4.51 GiB but 0 inodes free", "delete some files, ...")``.
    """
    _, free = free_bytes(folder)
    inodes, left = free_inodes(folder), f"{free / GIB:.2f} GiB"
    # Some file systems derive the number of free inodes from the free space.
    if inodes is None or inodes >= _FEW_INODES or free < MIB:
        return f"{left} free", "free some space"
    advice = "delete some files, however small (each takes an inode)"
    return f"{left} but {inodes} inodes free", advice
