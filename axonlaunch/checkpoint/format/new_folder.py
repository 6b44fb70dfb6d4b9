"""Creates an output folder that is removed if the command fails, so the command can be repeated."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.system.storage.disk import shortage


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create a folder, and delete its content if the block raises.

    Raises:
        ConfigError: The folder is not empty, or it can't be created or written.
    """
    is_there = folder.exists()
    if is_there and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError([ConfigIssue("", f"{folder}: is there already; give a new folder")])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([ConfigIssue("", f"{folder}: can't be made: {error.strerror}")]) from None
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if is_there:
            folder.mkdir(exist_ok=True)
        if not (reason := _write_error(error, folder)):
            raise
        advice = shortage(folder)[1]
        message = f"{folder}: can't be written: {reason}; {advice}, or write elsewhere"
        raise ConfigError([ConfigIssue("", message)]) from error


def _write_error(error: BaseException, folder: Path) -> str:
    """Return the reason of a failed write in a folder; empty for any other error."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return next((reason for cause in causes if (reason := _write_error(cause, folder))), "")
    if isinstance(error, SafetensorError):  # its writer has no class for this
        match = re.search(r"serializing: I/O error: (.*?) \(os error \d+\)", str(error))
        return match[1] if match else ""
    if not isinstance(error, OSError):
        return ""
    is_elsewhere = error.filename is not None and folder not in Path(error.filename).parents
    return "" if is_elsewhere else error.strerror or str(error)
