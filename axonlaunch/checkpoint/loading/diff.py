"""Compares a checkpoint with the model of its run, and with another checkpoint.

Tensors are read in batches, so a checkpoint need not fit in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.format.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.checkpoint.loading import reader
from axonlaunch.config import CONFIG, RunConfig
from axonlaunch.config.problems.frozen_file import name_frozen_file


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two tensors of the same name.

    Attributes:
        name: Name of the tensor, which begins with ``"model."`` or ``"optimizer."``.
        largest: Largest absolute difference of an element; None if there is a reason instead.
        relative: Norm of the difference divided by the norm of the first tensor; None without
            ``largest``, or for a norm that is 0 or not finite.
        reason: Difference that is no number, as of the shape or of NaN; empty otherwise.
    """

    name: str
    largest: float | None
    relative: float | None
    reason: str = ""


def faults(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Return changed files, missing parameters and wrong shapes of a checkpoint.

    Args:
        checkpoint: Checkpoint with the expected file sizes; all files are read.
        config: Configuration of its run.

    Raises:
        ConfigError: The model can't be built.
    """
    from axonlaunch.models.adapters.lora import not_saved
    from axonlaunch.models.build import on_meta

    problems = [f"{name} {step_folders.CHANGED}" for name in step_folders.damage(checkpoint)]
    if problems:
        return problems
    with name_frozen_file(checkpoint.path.parent.parent / CONFIG):
        model = on_meta(config, seed=config.seed)
    try:
        return reader.model_differences(checkpoint, model, without=not_saved(config, model))
    except CorruptCheckpointError as error:
        return [str(error).removeprefix(f"{checkpoint.path} ")]


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> list[TensorDifference]:
    """Return the tensors whose bits differ, parameters first, the largest difference first."""
    first_entries, second_entries = reader.contents(first), reader.contents(second)
    for checkpoint in (first, second):
        reader.refuse_damage(checkpoint)
    differences = [
        TensorDifference(
            name, None, None, f"only in {(first if name in first_entries else second).path}"
        )
        for name in sorted(first_entries.keys() ^ second_entries.keys())
    ]
    same_shape = []
    for name in sorted(first_entries.keys() & second_entries.keys()):
        sizes = [list(entries[name].size) for entries in (first_entries, second_entries)]
        if sizes[0] == sizes[1]:
            same_shape.append(name)
        else:
            differences.append(TensorDifference(name, None, None, f"{sizes[0]} and {sizes[1]}"))
    tensors = (
        reader.tensors(first, same_shape, first_entries),
        reader.tensors(second, same_shape, second_entries),
    )
    for name, a, b in zip(same_shape, *tensors, strict=True):
        if a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
            differences.append(_difference(name, a, b))
    return sorted(differences, key=_order)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _difference(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Return the difference of two tensors of one shape whose dtypes or bits differ."""
    first, second = _exact_numbers(a, b)
    is_same = (first == second) | (first.isnan() & second.isnan())
    distance = torch.maximum(first, second) - torch.minimum(first, second)
    if distance.dtype == torch.int64:
        distance = distance.view(torch.uint64)  # the largest distances need all 64 bits
    difference = torch.where(is_same, 0, distance.double())
    largest = float(difference.max()) if difference.numel() else 0.0
    if not math.isfinite(largest):
        return TensorDifference(name, None, None, "differs in NaN or infinite elements")
    if largest > 0:
        norm = float(first.double().norm())
        is_ratio = 0 < norm < math.inf  # an infinite element may be the same in both
        relative = float(difference.norm()) / norm if is_ratio else None
        return TensorDifference(name, largest, relative)
    if a.dtype != b.dtype:
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (a, b)]
        return TensorDifference(name, None, None, f"equal numbers in {' and '.join(dtypes)}")
    return TensorDifference(name, None, None, "differs only in signs of zeros or bits of NaN")


def _exact_numbers(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in one type that has all their numbers; of complex ones, both parts."""
    if any(tensor.is_complex() for tensor in tensors):
        return [torch.view_as_real(tensor.to(torch.complex128)) for tensor in tensors]
    has_fractions = any(tensor.is_floating_point() for tensor in tensors)
    return [tensor.to(torch.float64 if has_fractions else torch.int64) for tensor in tensors]


def _order(difference: TensorDifference) -> tuple[bool, bool, float, str]:
    is_parameter = difference.name.startswith("model.")
    has_numbers = difference.largest is not None
    return not is_parameter, has_numbers, -(difference.largest or 0.0), difference.name
