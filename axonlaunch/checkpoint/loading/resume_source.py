"""Decides where a run resumes from, given ``checkpoint.resume`` and its existing checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axonlaunch.checkpoint.format.step_folders import find_checkpoint
from axonlaunch.checkpoint.format.storage import is_remote, reaching, root, storage_path
from axonlaunch.config import RunConfig


def checkpoint_root(config: RunConfig) -> Path | None:
    """Return the parent of a run's ``checkpoints`` folder; None if the run folder will be new."""
    if config.checkpoint.path is not None:
        return storage_path(config.checkpoint.path)
    if config.run_dir == config.name == "auto":
        return None
    return Path(config.run_dir if config.run_dir != "auto" else f"runs/{config.name}")


def resume_of(config: RunConfig) -> str:
    """Return the source that a run resumes from: ``auto``, ``never`` or a path.

    A path to another run is only the starting point, like torchtitan's ``initial_load_path``: once
    the run has saved, the result is ``auto``, its latest checkpoint. A path to a checkpoint of the
    run itself goes back to that checkpoint. With ``checkpoint.overwrite`` the run's own checkpoints
    don't count.

    Example: ``name=b checkpoint.resume=runs/a`` starts run ``b`` from step 20, the last of ``a``.
    ``b`` is stopped after step 89. The same command then continues ``b`` from step 89.

    Args:
        config: Configuration of the run; ``run_dir`` may be unresolved.

    Raises:
        ConfigError: The run's checkpoints can't be reached.
    """
    resume, root_dir = config.checkpoint.resume, checkpoint_root(config)
    if config.checkpoint.overwrite:
        return "never" if resume == "auto" else resume
    if resume in ("auto", "never") or root_dir is None:
        return resume
    if is_of(storage_path(resume), root_dir):
        return resume
    with reaching(root_dir):
        return resume if find_checkpoint(root_dir) is None else "auto"


def resume_of_restart(
    config: RunConfig, events: Iterable[Mapping[str, Any]], *, launched_by: str
) -> str:
    """Return the source that a run resumes from when its launcher starts it again.

    The launcher repeats the command unchanged. ``never`` applies to the first start only, because
    the run folder exists at the second. A path to a checkpoint of the run itself also applies once,
    because going back again would set aside the checkpoints saved since.

    Args:
        config: Configuration of the run; ``run_dir`` is resolved.
        events: Events of the run folder.
        launched_by: Name of the launcher in these events.
    """
    resume = config.checkpoint.resume
    if resume == "auto" or (resume != "never" and not is_of(storage_path(resume), root(config))):
        return resume
    events_of_launcher: set[str] = set()
    is_this_launcher = False
    for event in events:
        if event["event"] == "launched":
            is_this_launcher = event.get("by") == launched_by
            events_of_launcher = events_of_launcher if is_this_launcher else set()
        if is_this_launcher:
            events_of_launcher.add(event["event"])
    first_start = "launched" if resume == "never" else "started"
    return "auto" if first_start in events_of_launcher else resume


def is_launched_by(events: Iterable[Mapping[str, Any]], launched_by: str) -> bool:
    """Return whether a launcher made the latest start of a run.

    Args:
        events: Events of the run, the oldest first.
        launched_by: Name of the launcher in these events.
    """
    starts = [event.get("by") for event in events if event["event"] == "launched"]
    return starts[-1:] == [launched_by]


def is_of(path: Path, run_dir: Path) -> bool:
    """Return whether a path belongs to a run.

    Args:
        path: Parent of a ``checkpoints`` folder, or a checkpoint.
        run_dir: Parent of the run's ``checkpoints`` folder.
    """
    path, run_dir = _real(path), _real(run_dir)
    return run_dir in (path, path.parent.parent)


def _real(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()
