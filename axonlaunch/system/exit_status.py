"""Exit status of a node's process, in a file for the batch script that started it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

STATUSES = "AXONLAUNCH_STATUSES"
"""Environment variable with the folder of these files, one for each process of a job step."""


def take_status_file() -> Path | None:
    """Return the file of this process, and remove it from the environment of other processes."""
    folder = os.environ.pop(STATUSES, "")
    return Path(folder, os.environ.get("SLURM_PROCID", "0")) if folder else None


def write_status(file: Path | None, status: int) -> None:
    """Write the exit status, if the file can be written; that of a lost node is missing too."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.write_text(f"{status}\n")
