"""What ``checkpoint.resume`` means to a run that may have checkpoints of its own by now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axonlaunch.checkpoint.step_folders import find_checkpoint
from axonlaunch.checkpoint.storage import is_remote, reaching, root, storage_path
from axonlaunch.config import RunConfig


def own_folder(config: RunConfig) -> Path | None:
    """Return where a run keeps its ``checkpoints`` folder; None: its run folder will be new."""
    if config.checkpoint.path is not None:
        return storage_path(config.checkpoint.path)
    if config.run_dir == config.name == "auto":
        return None
    return Path(config.run_dir if config.run_dir != "auto" else f"runs/{config.name}")


def resume_of(config: RunConfig) -> str:
    """Return what a run resumes from: ``auto``, ``never`` or a path.

    A path elsewhere says where a run begins. Once it has saved, its command, given again, resumes
    from what it saved itself, as with torchtitan's ``initial_load_path``: ``name=b
    checkpoint.resume=runs/a`` starts from a's step 20, is stopped after step 89, and continues
    there. A path to one of its own checkpoints goes back to that.

    Args:
        config: Its ``run_dir`` may be unresolved.

    Raises:
        ConfigError: Its checkpoints can't be reached.
    """
    resume, own = config.checkpoint.resume, own_folder(config)
    if resume in ("auto", "never") or own is None:
        return resume
    if is_of(storage_path(resume), own):
        return resume
    with reaching(own):
        return resume if find_checkpoint(own) is None else "auto"


def resume_of_restart(
    config: RunConfig, events: Iterable[Mapping[str, Any]], *, launched_by: str
) -> str:
    """Return what a run resumes from that its launcher starts again, by the same command.

    ``never`` is of what others saved: the run would be refused, as its folder is there. A path of
    its own goes back to that checkpoint once: again, it would put aside what was saved since.

    Args:
        config: Its ``run_dir`` is resolved.
        events: Those of its folder.
        launched_by: What its launcher is called in the folder's events.
    """
    resume = config.checkpoint.resume
    if resume == "auto" or (resume != "never" and not is_of(storage_path(resume), root(config))):
        return resume
    since_others: set[str] = set()
    is_ours = False
    for event in events:
        if event["event"] == "launched":
            is_ours = event.get("by") == launched_by
            since_others = since_others if is_ours else set()
        if is_ours:
            since_others.add(event["event"])
    return "auto" if ("launched" if resume == "never" else "started") in since_others else resume


def is_of(place: Path, run_dir: Path) -> bool:
    """Say whether a place is the folder that holds a run's ``checkpoints``, or one of them."""
    place, own = _real(place), _real(run_dir)
    return own in (place, place.parent.parent)


def _real(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()
