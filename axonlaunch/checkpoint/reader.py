"""Reads checkpoints into states of any layout, and tells what is in them.

Files whose checksum is not what was written are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint import folders
from axonlaunch.checkpoint.folders import Checkpoint, DamagedError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.comm import World


def load(checkpoint: Checkpoint, state: dict[str, Any], *, world: World) -> dict[str, Any]:
    """Read a checkpoint into a state of this layout, in place; every rank calls this.

    Raises:
        DamagedError: A file is not what was written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    share = partial(folders.damage, checkpoint, part=world.rank, parts=world.world_size)
    with folders.reading(checkpoint), ThreadPoolExecutor(max_workers=1) as beside:
        summing = beside.submit(share)
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path))
        except (Exception, CheckpointException):  # the latter is none of the former
            refuse_damage(checkpoint)  # of a damaged file torch says what it stumbled over
            raise
        _refuse(checkpoint, summing.result())
    return state


def load_model(checkpoint: Checkpoint, model: dict[str, Tensor]) -> None:
    """Read parameters and buffers alone, in one process, in place.

    Raises:
        DamagedError: A file is not what was written.
    """
    refuse_damage(checkpoint)
    read(checkpoint, {"model": model})


def read(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Read whole tensors in one process, in place; ``refuse_damage`` is the caller's."""
    import torch.distributed.checkpoint as dcp

    with folders.reading(checkpoint), in_one_process():
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=True)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Let torch read or write in one process, which is what is meant, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint holds: name -> shape and dtype, as torch's index has them."""
    import torch.distributed.checkpoint as dcp

    found: dict[str, Any] = (
        dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    )
    return found


def saved_states(checkpoint: Checkpoint) -> set[str]:
    """Return the kinds of optimizer states in a checkpoint, ``{"step", "exp_avg", ...}``."""
    keys = contents(checkpoint)
    return {key.rsplit(".", 1)[-1] for key in keys if key.startswith("optimizer.")}


def differences(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    """Compare the names and shapes of a model's parameters with a checkpoint's; [] if equal."""
    saved = {
        key.removeprefix("model."): tuple(value.size)
        for key, value in contents(checkpoint).items()
        if key.startswith("model.") and hasattr(value, "size")
    }
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    found = [f"{name} is missing" for name in wanted if name not in saved]
    found += [f"{name} is unexpected" for name in saved if name not in wanted.keys() | buffers]
    found += [
        f"{name} has shape {list(saved[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    return found


def refuse_damage(checkpoint: Checkpoint) -> None:
    """Read a checkpoint's files, and refuse what is not what was written.

    Raises:
        DamagedError: It names the files and, if there is one, the checkpoint before.
    """
    _refuse(checkpoint, folders.damage(checkpoint))


def _refuse(checkpoint: Checkpoint, changed: list[str]) -> None:
    if not changed:
        return
    folder = checkpoint.path.parent.parent
    others = [c.path for c in folders.listed(folder) if c.step < checkpoint.step]
    message = (
        f"{checkpoint.path}: {', '.join(changed)} is not what was written (its CRC-32 differs)"
    )
    if others:
        message += f"; go on from the one before with checkpoint.resume={others[-1]}"
    raise DamagedError(message)
