"""Finds the run or checkpoint at a path that the user gave."""

from __future__ import annotations

from pathlib import Path

from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.checkpoint.format.step_folders import corrupt_checkpoints, find_checkpoint
from axonlaunch.checkpoint.format.storage import reaching
from axonlaunch.config import ConfigError, ConfigIssue, suggest_run_folder
from axonlaunch.system.storage.files import why_no_folder


def require_folder(path: Path) -> None:
    """Require that a folder exists.

    Raises:
        ConfigError: There is no such folder, or its storage can't be reached.
    """
    with reaching(path):
        is_folder = path.is_dir()
    if not is_folder:
        message = f"{path}: {why_no_folder(path)}{suggest_run_folder(path)}"
        raise ConfigError([ConfigIssue("", message)])


def require_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint, or the newest one of a run.

    Raises:
        ConfigError: There is no such folder, or it has no valid checkpoint.
    """
    require_folder(path)
    with reaching(path):
        checkpoint = find_checkpoint(path)
        if checkpoint is not None:
            return checkpoint
        corrupt = [f"{each} {reason}" for each, reason in corrupt_checkpoints(path).items()]
    message = "; ".join(corrupt) or f"{path}: contains no checkpoint; give a run or a checkpoint"
    raise ConfigError([ConfigIssue("", message)])
