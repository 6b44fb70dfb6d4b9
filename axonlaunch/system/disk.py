"""Free space of the disk that a folder is on, or will be on once it is made."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_bytes(folder: Path) -> tuple[Path, int]:
    """Return the nearest folder that exists, from this one upwards, and its disk's free bytes."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing, shutil.disk_usage(existing).free
