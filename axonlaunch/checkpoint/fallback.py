"""Goes back to an earlier checkpoint, and keeps the corrupt ones, or later ones, aside.

What can't be read for other reasons than damage is an error: nothing is passed over for a disk that
does not answer. What was put aside is neither counted nor deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from axonlaunch.checkpoint import reader, step_folders
from axonlaunch.checkpoint.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.checkpoint.start import is_of
from axonlaunch.checkpoint.storage import CHECKPOINTS, filesystem, is_remote, kept_by, sizes
from axonlaunch.system.files import read_text, replace_text

if TYPE_CHECKING:
    from axonlaunch.comm import World

CORRUPT = ".corrupt"
SUPERSEDED = ".superseded"
REASON = "damage.json"
_ASIDE = re.compile(rf"step_\d+({re.escape(CORRUPT)}|{re.escape(SUPERSEDED)})(-\d+)?")
_LARGEST_REASON = 1 << 16


@dataclass(frozen=True)
class Resumed:
    """What a run resumes from.

    Attributes:
        checkpoint: The newest good one; None where the run has none.
        state: As it was loaded.
        aside: On the main rank a line for each that was corrupt, and was put aside.
    """

    checkpoint: Checkpoint | None
    state: dict[str, Any]
    aside: tuple[str, ...] = ()


def newest_good(where: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return a run's newest checkpoint that shows no damage, and what the newer ones lack.

    Where there is no good one, those that were put aside before count as corrupt too.

    Sizes and indices are looked at; what is in tensors shows when they are loaded.

    Args:
        where: A run's folder, or a checkpoint.

    Raises:
        OSError: They can't be listed or read.
    """
    newest = step_folders.find_checkpoint(where)
    if newest is None:
        return None, step_folders.corrupt_checkpoints(where) | put_aside_before(where)
    wrong: dict[Path, str] = {}
    before = (
        []
        if newest.path == step_folders.follow_link(where)
        else step_folders.list_checkpoints(where)[:-1]
    )
    for checkpoint in [newest, *reversed(before)]:
        reason = reader.index_fault(checkpoint)
        if reason is None:
            return checkpoint, step_folders.corrupt_checkpoints(where, after=checkpoint) | wrong
        wrong[checkpoint.path] = reason
    return None, step_folders.corrupt_checkpoints(where) | wrong | put_aside_before(where)


def load_newest(
    run_dir: Path, state: Callable[[], dict[str, Any]], *, world: World, passes_over: bool
) -> Resumed:
    """Load a run's newest good checkpoint into a state of this layout; every rank calls this.

    The main rank chooses, so that all load the same.

    Args:
        run_dir: Where the run keeps its checkpoints.
        state: Gives what is to be filled; it may be filled in part before it is filled for good.
        world: Whose ranks load.
        passes_over: Whether corrupt ones are put aside. Otherwise they are an error.

    Raises:
        CorruptCheckpointError: The newest is corrupt, or there is no good one.
        OSError: They can't be listed or read.
    """
    aside: list[str] = []
    while True:
        chosen = _choose(run_dir, aside, passes_over=passes_over) if world.is_main else 0
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
            if not passes_over or checkpoint is None:
                raise
            if world.is_main:
                _remember(checkpoint.path, error.reason.removeprefix(f"{checkpoint.path}: "), aside)
        else:
            return Resumed(checkpoint, loaded, tuple(aside))


def _choose(run_dir: Path, aside: list[str], *, passes_over: bool) -> int:
    """Return the step of a run's newest good checkpoint, -1 where there is none.

    Raises:
        CorruptCheckpointError: There are corrupt ones alone, or such are not to be passed over.
    """
    checkpoint, wrong = newest_good(run_dir)
    if wrong and (checkpoint is None or not passes_over):
        reasons = "; ".join(f"{path} {reason}" for path, reason in wrong.items())
        raise CorruptCheckpointError(f"{reasons}; {instead(checkpoint)}")
    for folder, reason in wrong.items():
        _remember(folder, reason, aside)
    return -1 if checkpoint is None else checkpoint.step


def _remember(folder: Path, reason: str, aside: list[str]) -> None:
    folder_aside = put_aside(folder, reason)
    aside.append(f"{folder} is corrupt: {reason}; it is kept as {folder_aside.name}")


def put_later_aside(chosen: Checkpoint, run_dir: Path) -> list[str]:
    """Put aside what a run saved after the checkpoint of its own that it goes back to.

    The run would otherwise resume next from the newest, which is of the history that it left:
    back at step 20, stopped after 44, it would continue at the earlier attempt's 89.

    Args:
        chosen: The checkpoint that the run resumes from.
        run_dir: Where the run keeps its checkpoints.

    Returns:
        A line for each.

    Raises:
        OSError: They can't be listed or renamed.
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
    """Rename a checkpoint, so that it is none any more; return where it is now.

    In a remote place that copies it. The reason stays with it.

    Raises:
        OSError: It can't be renamed.
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
    """Return what was put aside of a run, and why.

    Raises:
        OSError: It can't be listed.
    """
    aside = kept_by(run_dir) / CHECKPOINTS
    folders = [aside / name for name in sorted(sizes(aside)) if _ASIDE.fullmatch(name)]
    return {folder: _reason(folder) for folder in folders}


def _reason(folder: Path) -> str:
    try:
        reason = json.loads(read_text(folder / REASON, at_most=_LARGEST_REASON))["reason"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "was corrupt"
    return str(reason)


def instead(checkpoint: Checkpoint | None) -> str:
    """Return what to write where checkpoints are corrupt, and a run does not pass over them."""
    choice = f"checkpoint.resume={checkpoint.path}, or " if checkpoint else ""
    return f"use {choice}another name, or remove what is corrupt"
