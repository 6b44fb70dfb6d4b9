"""Reads checkpoints into states of any layout, and lists their contents.

Files with a wrong checksum are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.format.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.system.storage.files import NotRegularError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from axonlaunch.comm import World

MODEL = "model."
"""Prefix of parameter names in a state."""
_BATCH_BYTES = 1 << 30
"""Bytes per batch of ``tensors`` (at least one tensor); each batch parses the index again."""


def load_checkpoint(
    checkpoint: Checkpoint, state: dict[str, Any], *, world: World
) -> dict[str, Any]:
    """Read a checkpoint into a state of this layout in place; a collective call.

    Args:
        checkpoint: Checkpoint found by ``step_folders``; it may be of another layout.
        state: Nested dictionary of tensors to fill. Of a DTensor only the local shard is read.
        world: World of the calling ranks; each verifies the checksums of a share of the files.

    Returns:
        The state that was passed in.

    Raises:
        CorruptCheckpointError: A file was changed or damaged; raised on every rank.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from axonlaunch.checkpoint.loading.dcp_reader import source
    from axonlaunch.checkpoint.loading.planners import ReadsBoxes

    share = partial(step_folders.damage, checkpoint, part=world.rank, parts=world.world_size)
    damage: CorruptCheckpointError | None = None
    try:
        with step_folders.reading(checkpoint), ThreadPoolExecutor(max_workers=1) as thread:
            checksums = thread.submit(share)
            try:
                dcp.load(state, storage_reader=source(checkpoint.path), planner=ReadsBoxes())
            except (Exception, CheckpointException) as error:  # the latter is a BaseException
                refuse_damage(checkpoint)  # a wrong checksum explains torch's error better
                raise _damage_in(checkpoint, error) or error from None
            _refuse(checkpoint, checksums.result())
    except CorruptCheckpointError as error:
        damage = error
    if not any_rank(damage is not None, world=world):
        return state
    if damage is None:  # another rank found it in its share of the files
        try:
            refuse_damage(checkpoint)
        except CorruptCheckpointError as error:
            damage = error
    any_rank(True, world=world)  # wait, so that no rank still reads it when it is set aside
    raise damage or CorruptCheckpointError(f"{checkpoint.path} could not be read by another rank")


def find_for_all(path: Path, *, world: World) -> Checkpoint | None:
    """Return the checkpoint that the main rank finds at a path; a collective call.

    Another run may save at the same time, and ranks would otherwise load different steps.

    Args:
        path: Folder of a run, or a checkpoint.
        world: World of the calling ranks.

    Raises:
        CorruptCheckpointError: This rank does not see the checkpoint that the main rank chose.
        OSError: The path can't be listed or read.
    """
    found = step_folders.find_checkpoint(path) if world.is_main else None
    chosen = 0 if not world.is_main else -1 if found is None else found.step
    step = sum_of_ranks(chosen, world=world)
    if world.is_main or step < 0:
        return found
    same = step_folders.find_checkpoint(path, step=step)
    if same is None or same.step != step:
        raise CorruptCheckpointError(f"{path}: step {step} is not seen by this rank")
    return same


def any_rank(is_true: bool, *, world: World) -> bool:
    """Return whether the value is true on any rank; a collective call."""
    return sum_of_ranks(int(is_true), world=world) > 0


def sum_of_ranks(number: int, *, world: World) -> int:
    """Return the sum of each rank's number; a collective call."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(number)
    if world.world_size > 1:
        dist.all_reduce(total)
    return int(total)


def load_model(checkpoint: Checkpoint, model: dict[str, Tensor]) -> None:
    """Read only parameters and buffers, in one process, in place.

    Args:
        checkpoint: Checkpoint to read; all its files are verified first.
        model: Full tensors to fill, by name in the model.

    Raises:
        CorruptCheckpointError: A file was changed or damaged.
    """
    refuse_damage(checkpoint)
    read_full_tensors(checkpoint, {"model": model})


def read_full_tensors(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Read full tensors in one process, in place; the caller calls ``refuse_damage`` first.

    Raises:
        CorruptCheckpointError: The index or a file that it names was changed or damaged.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from axonlaunch.checkpoint.loading.dcp_reader import source
    from axonlaunch.checkpoint.loading.planners import ReadsBoxes

    with step_folders.reading(checkpoint), in_one_process():
        storage = source(checkpoint.path)
        try:
            dcp.load(state, storage_reader=storage, planner=ReadsBoxes(), no_dist=True)
        except CheckpointException as error:
            raise _damage_in(checkpoint, error) or error from None


def _damage_in(checkpoint: Checkpoint, error: BaseException) -> CorruptCheckpointError | None:
    """Return the damage that caused an error of torch; None for any other cause."""
    failures = getattr(error, "failures", {})
    causes = [cause for cause, _ in failures.values()]
    damages = (CorruptCheckpointError, NotRegularError, FileNotFoundError)
    return next((_corrupt(checkpoint, c) for c in causes if isinstance(c, damages)), None)


def _corrupt(checkpoint: Checkpoint, cause: BaseException) -> CorruptCheckpointError:
    if isinstance(cause, OSError):
        return CorruptCheckpointError(f"{cause.filename}: {(cause.strerror or str(cause)).lower()}")
    return CorruptCheckpointError(f"{checkpoint.path} {cause}")


def tensors(
    checkpoint: Checkpoint, names: Sequence[str], contents: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yield full tensors in one process, with few in memory at the same time.

    Args:
        checkpoint: Checkpoint to read; the caller calls ``refuse_damage`` first.
        names: Keys of ``contents`` to read.
        contents: Contents of the checkpoint.
    """
    import torch

    batch: dict[str, Tensor] = {}
    for number, name in enumerate(names, 1):
        entry = contents[name]
        batch[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        if number == len(names) or sum(t.nbytes for t in batch.values()) > _BATCH_BYTES:
            state: dict[str, dict[str, Tensor]] = {}
            for full_name, tensor in batch.items():
                section, _, rest = full_name.partition(".")
                state.setdefault(section, {})[rest] = tensor
            read_full_tensors(checkpoint, state)
            yield from batch.values()
            batch = {}


@contextmanager
def in_one_process() -> Iterator[None]:
    """Silence torch's warning about reading or writing in one process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the shape and dtype of each tensor of a checkpoint, as entries of torch's index.

    Raises:
        CorruptCheckpointError: The index or the manifest was changed or contradicts the files.
    """
    from axonlaunch.checkpoint.loading.dcp_reader import read_dcp_index

    try:
        saved: dict[str, Any] = read_dcp_index(checkpoint.path).state_dict_metadata
    except (CorruptCheckpointError, NotRegularError, FileNotFoundError) as error:
        raise _corrupt(checkpoint, error) from None
    return saved


def index_fault(checkpoint: Checkpoint) -> str | None:
    """Return the fault of a checkpoint's index; None if it is valid.

    Raises:
        OSError: The index can't be read for a reason other than damage.
    """
    try:
        contents(checkpoint)
    except CorruptCheckpointError as error:
        return str(error).removeprefix(f"{checkpoint.path} ")
    return None


def parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's entries for parameters and buffers, keyed by name in the model."""
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
    """Return whether a run can resume from a checkpoint; imported weights lack the counters."""
    return any(key.startswith("counters.") for key in contents(checkpoint))


def shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's parameters and buffers by name."""
    return {name: tuple(entry.size) for name, entry in parameters(checkpoint).items()}


def model_differences(
    checkpoint: Checkpoint,
    model: nn.Module,
    *,
    without: Collection[str] = (),
    quantizes: bool = False,
) -> list[str]:
    """Return a message for each difference between a checkpoint and a model's parameters.

    Missing and unexpected names and other shapes are differences. Persistent buffers of the
    checkpoint are not.

    Args:
        checkpoint: Checkpoint to compare.
        model: The full model.
        without: Names of parameters that the checkpoint need not have.
        quantizes: Accept the shape before quantization for a quantized parameter, because loading
            quantizes the saved values.
    """
    saved = shapes(checkpoint)
    buffers = {name for name, _ in model.named_buffers()}
    return mismatches(saved, model, optional=buffers, without=without, quantizes=quantizes)


def mismatches(
    saved: Mapping[str, tuple[int, ...]],
    model: nn.Module,
    *,
    optional: Collection[str] = (),
    without: Collection[str] = (),
    quantizes: bool = False,
) -> list[str]:
    """Return a message for each difference between saved shapes and a model's parameters.

    Args:
        saved: Saved shapes by name.
        model: Model with the expected parameters.
        optional: Saved names that are no error if the model lacks them.
        without: Names of parameters that need not be saved.
        quantizes: Accept the shape before quantization for a quantized parameter, because loading
            quantizes the saved values.
    """
    from axonlaunch.models.tensors.packed_blocks import logical_shape

    named = {name: tensor for name, tensor in model.named_parameters() if name not in without}
    expected = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if quantizes:
        values = {name: logical_shape(tensor) for name, tensor in named.items()}
        expected |= {name: shape for name, shape in values.items() if saved.get(name) == shape}
    problems = [f"{name} is missing" for name in expected if name not in saved]
    problems += [
        f"{name} is unexpected" for name in saved if name not in expected and name not in optional
    ]
    problems += [
        f"{name} has shape {list(saved[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in saved and saved[name] != shape
    ]
    return problems


def refuse_damage(checkpoint: Checkpoint) -> None:
    """Verify the checksums of a checkpoint's files.

    Raises:
        CorruptCheckpointError: A file was changed; names the files and the previous checkpoint.
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
