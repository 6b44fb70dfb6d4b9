"""Falls back to an earlier checkpoint and sets corrupt or later checkpoints aside.

Only damage causes a fallback. A read error for another reason, such as a disk that does not answer,
is raised. Checkpoints set aside are neither counted nor deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.format.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.checkpoint.format.storage import (
    CHECKPOINTS,
    checkpoints_parent,
    filesystem,
    is_remote,
    sizes,
)
from axonlaunch.checkpoint.loading import reader
from axonlaunch.checkpoint.loading.resume_source import is_of
from axonlaunch.system.storage.files import read_text, replace_text

if TYPE_CHECKING:
    from axonlaunch.comm import World

CORRUPT = ".corrupt"
SUPERSEDED = ".superseded"
REASON = "damage.json"
_ASIDE = re.compile(rf"step_\d+({re.escape(CORRUPT)}|{re.escape(SUPERSEDED)})(-\d+)?")
_LARGEST_REASON = 1 << 16


@dataclass(frozen=True)
class Resumed:
    """Checkpoint and state that a run resumes from.

    Attributes:
        checkpoint: Newest valid checkpoint; None if the run has no checkpoint.
        state: The loaded state.
        aside: One line for each corrupt checkpoint that was set aside (on the main rank).
    """

    checkpoint: Checkpoint | None
    state: dict[str, Any]
    aside: tuple[str, ...] = ()


def newest_valid(path: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest checkpoint without visible damage, and the faults of newer ones.

    Sizes and indices are checked; damaged tensors are found when they are loaded. If no checkpoint
    is valid, those set aside earlier are reported as corrupt as well.

    Args:
        path: Folder of a run, or a checkpoint.

    Raises:
        OSError: The checkpoints can't be listed or read.
    """
    newest = step_folders.find_checkpoint(path)
    if newest is None:
        return None, step_folders.corrupt_checkpoints(path) | put_aside_before(path)
    faults: dict[Path, str] = {}
    older = (
        []
        if newest.path == step_folders.follow_link(path)
        else step_folders.list_checkpoints(path)[:-1]
    )
    for checkpoint in [newest, *reversed(older)]:
        reason = reader.index_fault(checkpoint)
        if reason is None:
            return checkpoint, step_folders.corrupt_checkpoints(path, after=checkpoint) | faults
        faults[checkpoint.path] = reason
    return None, step_folders.corrupt_checkpoints(path) | faults | put_aside_before(path)


def load_newest(
    run_dir: Path, state: Callable[[], dict[str, Any]], *, world: World, skip_corrupt: bool
) -> Resumed:
    """Load a run's newest valid checkpoint into a state of this layout; a collective call.

    The main rank chooses the checkpoint, so that all ranks load the same one.

    Args:
        run_dir: Folder that contains the run's ``checkpoints``.
        state: Returns the state to fill. A failed attempt may fill it partly; the next attempt
            calls it again.
        world: World of the ranks that load.
        skip_corrupt: Whether corrupt checkpoints are set aside; otherwise they are an error.

    Raises:
        CorruptCheckpointError: The newest checkpoint is corrupt and ``skip_corrupt`` is false, or
            no checkpoint is valid.
        OSError: The checkpoints can't be listed or read.
    """
    aside: list[str] = []
    while True:
        chosen = _choose(run_dir, aside, skip_corrupt=skip_corrupt) if world.is_main else 0
        step = reader.sum_of_ranks(chosen, world=world)
        if step < 0:
            return Resumed(None, {}, tuple(aside))
        checkpoint = step_folders.read_checkpoint(step_folders.path_of(run_dir, step=step))
        try:
            if checkpoint is None:
                raise CorruptCheckpointError(
                    f"{step_folders.path_of(run_dir, step=step)} is not seen by this rank"
                )
            loaded = reader.load_checkpoint(checkpoint, state(), world=world)
        except CorruptCheckpointError as error:
            if not skip_corrupt or checkpoint is None:
                raise
            if world.is_main:
                _remember(checkpoint.path, error.reason.removeprefix(f"{checkpoint.path}: "), aside)
        else:
            return Resumed(checkpoint, loaded, tuple(aside))


def _choose(run_dir: Path, aside: list[str], *, skip_corrupt: bool) -> int:
    """Return the step of the newest valid checkpoint; -1 without a checkpoint.

    Raises:
        CorruptCheckpointError: All checkpoints are corrupt, or ``skip_corrupt`` is false and the
            newest one is corrupt.
    """
    checkpoint, faults = newest_valid(run_dir)
    if faults and (checkpoint is None or not skip_corrupt):
        reasons = "; ".join(f"{path} {reason}" for path, reason in faults.items())
        raise CorruptCheckpointError(f"{reasons}; {instead(checkpoint)}")
    for folder, reason in faults.items():
        _remember(folder, reason, aside)
    return -1 if checkpoint is None else checkpoint.step


def _remember(folder: Path, reason: str, aside: list[str]) -> None:
    folder_aside = put_aside(folder, reason)
    aside.append(f"{folder} is corrupt: {reason}; it is kept as {folder_aside.name}")


def put_later_aside(chosen: Checkpoint, run_dir: Path) -> list[str]:
    """Set aside the later checkpoints of a run that goes back to an earlier one.

    The next resume would otherwise pick the newest checkpoint, which belongs to the abandoned
    attempt. Example: a run saved step 89, goes back to step 20 and is stopped after step 44; it
    would then continue from step 89.

    Args:
        chosen: Checkpoint that the run resumes from.
        run_dir: Folder that contains the run's ``checkpoints``.

    Returns:
        One line for each checkpoint set aside.

    Raises:
        OSError: The checkpoints can't be listed or renamed.
    """
    if not is_of(chosen.path, run_dir):
        return []
    lines = []
    for later in step_folders.list_checkpoints(run_dir):
        if later.step > chosen.step:
            reason = f"the run went back to step {chosen.step}"
            aside = put_aside(later.path, reason, suffix=SUPERSEDED)
            lines.append(f"{later.path} is kept as {aside.name}: {reason}")
    return lines


def put_aside(folder: Path, reason: str, *, suffix: str = CORRUPT) -> Path:
    """Rename a checkpoint so that it no longer counts as one; return its new path.

    Remote storage copies it instead of renaming it. The reason is stored in the folder.

    Raises:
        OSError: The folder can't be renamed.
    """
    taken = sizes(folder.parent)
    number, name = 1, folder.name + suffix
    while name in taken:
        number += 1
        name = f"{folder.name}{suffix}-{number}"
    aside = folder.with_name(name)
    content = json.dumps({"reason": reason}) + "\n"
    if is_remote(folder):
        source, target = cast("Any", folder).path, cast("Any", aside).path
        filesystem(folder).mv(source, target, recursive=True)
        (aside / REASON).write_text(content)
    else:
        folder.rename(aside)
        if not aside.is_symlink():
            replace_text(aside / REASON, content)
    return aside


def put_aside_before(run_dir: Path) -> dict[Path, str]:
    """Return the checkpoints of a run that were set aside, with the reasons.

    Raises:
        OSError: The run folder can't be listed.
    """
    parent = checkpoints_parent(run_dir) / CHECKPOINTS
    folders = [parent / name for name in sorted(sizes(parent)) if _ASIDE.fullmatch(name)]
    return {folder: _reason(folder) for folder in folders}


def _reason(folder: Path) -> str:
    try:
        reason = json.loads(read_text(folder / REASON, at_most=_LARGEST_REASON))["reason"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "was corrupt"
    return str(reason)


def instead(checkpoint: Checkpoint | None) -> str:
    """Return the advice for a run that stops at corrupt checkpoints."""
    choice = f"checkpoint.resume={checkpoint.path}, or " if checkpoint else ""
    return f"use {choice}another name, or remove the corrupt files"
