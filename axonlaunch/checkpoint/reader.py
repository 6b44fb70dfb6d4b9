"""Reads checkpoints into states of any layout, and reports what is in them.

Files whose checksum is not what was written are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint import step_folders
from axonlaunch.checkpoint.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.system.files import NotRegularError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from axonlaunch.comm import World

MODEL = "model."
"""What precedes the names of parameters in a state."""
_AT_ONCE = 1 << 30
"""Bytes that ``tensors`` reads at once, at least a tensor: each reading takes the whole index."""


def load_checkpoint(
    checkpoint: Checkpoint, state: dict[str, Any], *, world: World
) -> dict[str, Any]:
    """Read a checkpoint into a state of this layout, in place; every rank calls this.

    Args:
        checkpoint: As ``step_folders`` found it; its layout may be another.
        state: Nested; tensors, also DTensors, are filled, and say which parts are read.
        world: Whose ranks verify the checksums of a part of the files each.

    Returns:
        The state itself.

    Raises:
        CorruptCheckpointError: A file is not what was written; raised on every rank.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from axonlaunch.checkpoint.dcp_reader import source
    from axonlaunch.checkpoint.planners import ReadsBoxes

    share = partial(step_folders.damage, checkpoint, part=world.rank, parts=world.world_size)
    damage: CorruptCheckpointError | None = None
    try:
        with step_folders.reading(checkpoint), ThreadPoolExecutor(max_workers=1) as beside:
            summing = beside.submit(share)
            try:
                dcp.load(state, storage_reader=source(checkpoint.path), planner=ReadsBoxes())
            except (Exception, CheckpointException) as error:  # the latter is none of the former
                refuse_damage(checkpoint)  # of a corrupt file torch says what it stumbled over
                raise _damage_in(checkpoint, error) or error from None
            _refuse(checkpoint, summing.result())
    except CorruptCheckpointError as error:
        damage = error
    if not any_rank(damage is not None, world=world):
        return state
    if damage is None:  # it is in another rank's share of the checksums
        try:
            refuse_damage(checkpoint)
        except CorruptCheckpointError as error:
            damage = error
    any_rank(True, world=world)  # nobody puts it aside while another still reads it
    raise damage or CorruptCheckpointError(f"{checkpoint.path} could not be read by another rank")


def find_for_all(path: Path, *, world: World) -> Checkpoint | None:
    """Return the checkpoint that a path means to the main rank; every rank calls this.

    A run that saves meanwhile would otherwise give ranks parts of different steps.

    Args:
        path: A run's folder, or a checkpoint.
        world: Whose ranks are to load the same.

    Raises:
        CorruptCheckpointError: This rank does not see what the main rank chose.
        OSError: It can't be listed or read.
    """
    found = step_folders.find_checkpoint(path) if world.is_main else None
    chosen = 0 if not world.is_main else -1 if found is None else found.step
    step = sum_of_ranks(chosen, world=world)
    if world.is_main or step < 0:
        return found
    seen = step_folders.find_checkpoint(path, step=step)
    if seen is None or seen.step != step:
        raise CorruptCheckpointError(f"{path}: step {step} is not seen by this rank")
    return seen


def any_rank(is_true: bool, *, world: World) -> bool:
    """Whether any rank found something; every rank calls this, and gets the same answer."""
    return sum_of_ranks(int(is_true), world=world) > 0


def sum_of_ranks(number: int, *, world: World) -> int:
    """Add a number of each rank; every rank calls this, and gets the same sum."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(number)
    if world.world_size > 1:
        dist.all_reduce(total)
    return int(total)


def load_model(checkpoint: Checkpoint, model: dict[str, Tensor]) -> None:
    """Read parameters and buffers alone, in one process, in place.

    Args:
        checkpoint: Every file of it is verified first.
        model: Whole tensors by name in the model, which are filled.

    Raises:
        CorruptCheckpointError: A file is not what was written.
    """
    refuse_damage(checkpoint)
    read_whole_tensors(checkpoint, {"model": model})


def read_whole_tensors(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Read whole tensors in one process, in place; ``refuse_damage`` is the caller's.

    Raises:
        CorruptCheckpointError: The index, or what it names, is not what was written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from axonlaunch.checkpoint.dcp_reader import source
    from axonlaunch.checkpoint.planners import ReadsBoxes

    with step_folders.reading(checkpoint), in_one_process():
        read_from = source(checkpoint.path)
        try:
            dcp.load(state, storage_reader=read_from, planner=ReadsBoxes(), no_dist=True)
        except CheckpointException as error:
            raise _damage_in(checkpoint, error) or error from None


def _damage_in(checkpoint: Checkpoint, error: BaseException) -> CorruptCheckpointError | None:
    """Return what an error of torch's says of damage; None where it is about something else."""
    failures = getattr(error, "failures", {})
    causes = [cause for cause, _ in failures.values()]
    known = (CorruptCheckpointError, NotRegularError, FileNotFoundError)
    return next((_corrupt(checkpoint, c) for c in causes if isinstance(c, known)), None)


def _corrupt(checkpoint: Checkpoint, cause: BaseException) -> CorruptCheckpointError:
    if isinstance(cause, OSError):
        return CorruptCheckpointError(f"{cause.filename}: {(cause.strerror or str(cause)).lower()}")
    return CorruptCheckpointError(f"{checkpoint.path} {cause}")


def tensors(
    checkpoint: Checkpoint, names: Sequence[str], contents: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yield whole tensors in one process, a few in memory at once.

    Args:
        checkpoint: ``refuse_damage`` is the caller's.
        names: As ``contents`` has them.
        contents: Of the checkpoint.
    """
    import torch

    batch: dict[str, Tensor] = {}
    for number, name in enumerate(names, 1):
        entry = contents[name]
        batch[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        if number == len(names) or sum(t.nbytes for t in batch.values()) > _AT_ONCE:
            state: dict[str, dict[str, Tensor]] = {}
            for full, tensor in batch.items():
                section, _, rest = full.partition(".")
                state.setdefault(section, {})[rest] = tensor
            read_whole_tensors(checkpoint, state)
            yield from batch.values()
            batch = {}


@contextmanager
def in_one_process() -> Iterator[None]:
    """Let torch read or write in one process, which is what is meant, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint holds: name -> shape and dtype, as torch's index has them.

    Raises:
        CorruptCheckpointError: Its index or manifest was changed, or says what can't be.
    """
    from axonlaunch.checkpoint.dcp_reader import read_dcp_index

    try:
        saved: dict[str, Any] = read_dcp_index(checkpoint.path).state_dict_metadata
    except (CorruptCheckpointError, NotRegularError, FileNotFoundError) as error:
        raise _corrupt(checkpoint, error) from None
    return saved


def index_fault(checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with a checkpoint's index; None if nothing is.

    Raises:
        OSError: It can't be read, which says nothing of what is in it.
    """
    try:
        contents(checkpoint)
    except CorruptCheckpointError as error:
        return str(error).removeprefix(f"{checkpoint.path} ")
    return None


def parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what ``contents`` has of parameters and buffers, by their own names."""
    return {
        key.removeprefix(MODEL): entry
        for key, entry in contents(checkpoint).items()
        if key.startswith(MODEL)
    }


def saved_states(checkpoint: Checkpoint) -> set[str]:
    """Return the names of optimizer states in a checkpoint, ``{"head.weight.exp_avg", ...}``."""
    prefix = "optimizer."
    return {key.removeprefix(prefix) for key in contents(checkpoint) if key.startswith(prefix)}


def is_of_a_run(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has what a run resumes from; imported weights alone do not."""
    return any(key.startswith("counters.") for key in contents(checkpoint))


def model_differences(
    checkpoint: Checkpoint, model: nn.Module, *, without: Collection[str] = ()
) -> list[str]:
    """Compare the names and shapes of a model's parameters with a checkpoint's; [] if equal.

    Args:
        checkpoint: Which.
        model: Whole.
        without: Parameters that are not wanted.
    """
    saved = {name: tuple(entry.size) for name, entry in parameters(checkpoint).items()}
    buffers = {name for name, _ in model.named_buffers()}
    return mismatches(saved, model, beside=buffers, without=without)


def mismatches(
    saved: Mapping[str, tuple[int, ...]],
    model: nn.Module,
    *,
    beside: Collection[str] = (),
    without: Collection[str] = (),
) -> list[str]:
    """Compare saved names and shapes with those of a model's parameters; [] if equal.

    Args:
        saved: Name -> shape.
        model: Its parameters are wanted.
        beside: What may be there and need not.
        without: Parameters that are not wanted.
    """
    named = model.named_parameters()
    wanted = {name: tuple(tensor.shape) for name, tensor in named if name not in without}
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [
        f"{name} is unexpected" for name in saved if name not in wanted and name not in beside
    ]
    problems += [
        f"{name} has shape {list(saved[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    return problems


def refuse_damage(checkpoint: Checkpoint) -> None:
    """Read a checkpoint's files, and refuse what is not what was written.

    Raises:
        CorruptCheckpointError: It names the files and, if there is one, the checkpoint before.
    """
    _refuse(checkpoint, step_folders.damage(checkpoint))


def _refuse(checkpoint: Checkpoint, changed: list[str]) -> None:
    if not changed:
        return
    folder = checkpoint.path.parent.parent
    others = [c.path for c in step_folders.list_checkpoints(folder) if c.step < checkpoint.step]
    message = f"{checkpoint.path}: {', '.join(changed)} {step_folders.CHANGED}"
    remedy = f"resume from the previous one with checkpoint.resume={others[-1]}" if others else ""
    raise CorruptCheckpointError(message, remedy=remedy)
