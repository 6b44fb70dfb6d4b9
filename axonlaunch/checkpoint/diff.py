"""A checkpoint held against its own run, and against another checkpoint.

Tensors are read some at a time, so that no checkpoint need fit in memory whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.checkpoint import reader, step_folders
from axonlaunch.checkpoint.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.config import RunConfig


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor is from one of the same name.

    Attributes:
        name: Of the tensor, ``"model."`` or ``"optimizer."`` first.
        largest: Difference of an element; None where only one has the tensor, or shapes differ.
        relative: The norm of the difference over the norm of the first; None likewise.
        reason: Why there is no number.
    """

    name: str
    largest: float | None
    relative: float | None
    reason: str = ""


def faults(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Return what is wrong with a checkpoint whose sizes are right: contents, and what it lacks.

    Args:
        checkpoint: It is read whole.
        config: Of its run.
    """
    from axonlaunch.models.build import on_meta

    problems = [f"{name} {step_folders.CHANGED}" for name in step_folders.damage(checkpoint)]
    if problems:
        return problems
    model = on_meta(config, seed=config.seed)
    try:
        return reader.model_differences(checkpoint, model)
    except CorruptCheckpointError as error:
        return [str(error).removeprefix(f"{checkpoint.path} ")]


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> list[TensorDifference]:
    """Return how two checkpoints differ, parameters first, the farthest before others.

    Equal tensors are left out.
    """
    ours, theirs = reader.contents(first), reader.contents(second)
    for checkpoint in (first, second):
        reader.refuse_damage(checkpoint)
    differences = [
        TensorDifference(name, None, None, f"only in {(first if name in ours else second).path}")
        for name in sorted(ours.keys() ^ theirs.keys())
    ]
    alike = []
    for name in sorted(ours.keys() & theirs.keys()):
        sizes = [list(checkpoint[name].size) for checkpoint in (ours, theirs)]
        if sizes[0] == sizes[1]:
            alike.append(name)
        else:
            differences.append(TensorDifference(name, None, None, f"{sizes[0]} and {sizes[1]}"))
    read = (reader.tensors(first, alike, ours), reader.tensors(second, alike, theirs))
    for name, *pair in zip(alike, *read, strict=True):
        a, b = (tensor.double() for tensor in pair)
        apart = (a - b).abs()
        if apart.numel() and float(apart.max()) > 0:
            norm = float(a.norm())
            relative = float(apart.norm()) / norm if norm else float("inf")
            differences.append(TensorDifference(name, float(apart.max()), relative))
    return sorted(differences, key=_order)


def _order(difference: TensorDifference) -> tuple[bool, bool, float, str]:
    elsewhere = not difference.name.startswith("model.")
    return elsewhere, difference.largest is not None, -(difference.largest or 0.0), difference.name
