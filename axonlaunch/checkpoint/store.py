"""Writes, finds and reads the folders ``checkpoints/step_<K>`` of a run.

A folder of that name is complete: it is written under another name, synced to disk, and renamed
last. Torch-free until something is written or read.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.comm import World

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: Its folder.
        step: Optimizer steps done.
        samples: Samples seen: the global index of the next one.
        world_size: Ranks that wrote it.
        loss: Training loss of the last step; None if it was not known.
    """

    path: Path
    step: int
    samples: int
    world_size: int
    loss: float | None


def save(
    run_dir: Path,
    state: dict[str, Any],
    *,
    world: World,
    step: int,
    samples: int,
    loss: float | None,
    keep: int,
) -> Path:
    """Write a checkpoint; every rank of the world calls this.

    Args:
        run_dir: The run's folder, on a file system that every rank sees.
        state: What ``Engine.state_dict`` gave.
        world: Who writes.
        step: Optimizer steps done.
        samples: Samples seen.
        loss: Training loss of the last step.
        keep: Newest checkpoints to keep, this one included.

    Returns:
        The complete checkpoint's folder.
    """
    import torch.distributed.checkpoint as dcp

    from axonlaunch.comm import barrier

    folder = run_dir / "checkpoints" / f"step_{step}"
    partial = folder.with_name(folder.name + PARTIAL)
    if world.is_main:
        sweep_partial(run_dir)
        partial.mkdir(parents=True)
    barrier()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
    barrier()
    if world.is_main:
        _finish(partial, folder, Checkpoint(folder, step, samples, world.world_size, loss))
        prune(run_dir, keep=keep)
    barrier()
    return folder


def load(checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint into a state of this layout, in place; every rank calls this."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path))
    return state


def load_model(checkpoint: Checkpoint, model: dict[str, Tensor]) -> None:
    """Read parameters and buffers alone, in one process, in place."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        # torch warns that it reads in one process, which is what this is for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": model}, storage_reader=dcp.FileSystemReader(checkpoint.path))


def latest(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, None where there is none."""
    found = _all(run_dir)
    return found[-1] if found else None


def resolve(path: Path) -> Checkpoint | None:
    """Return the checkpoint that a path means: itself, or a run's newest; None where neither."""
    return _read(path) if (path / MANIFEST).is_file() else latest(path)


def unreadable(run_dir: Path) -> list[str]:
    """Return the names of folders that should be checkpoints and are not: damaged, or newer."""
    folders = sorted((run_dir / "checkpoints").glob("step_*"))
    return [f.name for f in folders if not f.name.endswith(PARTIAL) and _read(f) is None]


def prune(run_dir: Path, *, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints."""
    for checkpoint in _all(run_dir)[:-keep]:
        # Renamed first: a folder of a checkpoint's name is never half deleted.
        doomed = checkpoint.path.with_name(checkpoint.path.name + PARTIAL)
        checkpoint.path.rename(doomed)
        shutil.rmtree(doomed)


def sweep_partial(run_dir: Path) -> list[str]:
    """Delete what interrupted saves left; return the names."""
    left = sorted((run_dir / "checkpoints").glob(f"step_*{PARTIAL}"))
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in left]


def _finish(partial: Path, folder: Path, checkpoint: Checkpoint) -> None:
    """Describe the written files, sync, and give them their name."""
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    about = {**asdict(checkpoint), "format": FORMAT, "files": files}
    del about["path"]
    manifest = partial / MANIFEST
    with manifest.open("w") as stream:
        json.dump(about, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    if folder.exists():  # the same step, saved again after a resume
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync_folder(folder.parent)


def _all(run_dir: Path) -> list[Checkpoint]:
    folders = (run_dir / "checkpoints").glob("step_*")
    found = [_read(f) for f in folders if not f.name.endswith(PARTIAL)]
    return sorted((c for c in found if c is not None), key=lambda c: c.step)


def _read(folder: Path) -> Checkpoint | None:
    """Read a manifest; None where the folder is no complete checkpoint of this format."""
    try:
        about = json.loads((folder / MANIFEST).read_text())
        files = about["files"]
        whole = all((folder / name).stat().st_size == size for name, size in files.items())
        if about["format"] > FORMAT or not whole:
            return None
        return Checkpoint(
            folder, about["step"], about["samples"], about["world_size"], about["loss"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saved_states(checkpoint: Checkpoint) -> set[str]:
    """Return the kinds of optimizer states in a checkpoint, ``{"step", "exp_avg", ...}``."""
    import torch.distributed.checkpoint as dcp

    keys = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    return {key.rsplit(".", 1)[-1] for key in keys if key.startswith("optimizer.")}


def differences(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    """Compare the names and shapes of a model's parameters with a checkpoint's; [] if equal."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    saved = {
        key.removeprefix("model."): tuple(value.size)
        for key, value in metadata.items()
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
