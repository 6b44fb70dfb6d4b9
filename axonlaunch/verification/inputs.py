"""What both sides of a comparison are fed: uneven targets, and weights that start nowhere special.

Even ones hide errors: with as many counted targets everywhere a mean of means is the mean, and a
bias of zero may be added as often as one likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from axonlaunch.config.data import IGNORE_INDEX
from axonlaunch.data.dataset import AnyBatch, Batch
from axonlaunch.data.loader import Loader
from axonlaunch.models.dtensor_regions import local_boxes

_COMPARED = 1024
"""Samples of training that held-out ones are looked for among."""
_MOVED_BY = 0.1
"""Deviation of what is added to biases and norms."""
_FOLLOWING = 0.5
"""Share of counted targets that are the next token, where rows are text."""
_COUNTED_OF_11 = 8
"""Samples of any structure that count."""
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def uneven(batch: AnyBatch, *, first_row: int, step: int) -> AnyBatch:
    """Leave targets out, as many as a row's place in the global batch and the step say.

    Of sequences [B, T] up to five eighths of each, of classes [B] every fourth row; of samples of
    any structure, whose targets nobody knows, three of eleven samples, side by side.

    Args:
        batch: Some rows of a global batch.
        first_row: The place of the first of them in it.
        step: Which global batch it is.
    """
    places = range(first_row, first_row + len(batch))
    if not isinstance(batch, Batch):
        return batch.counting((place + step * 3) % 11 < _COUNTED_OF_11 for place in places)
    targets = batch.targets.clone()
    for row, place in enumerate(places):
        if targets.ndim > 1:
            length = targets.shape[1]
            targets[row, : (place * 7 + step * 3) % 11 * length // 16] = IGNORE_INDEX
        elif place % 4 == 3:
            targets[row] = IGNORE_INDEX
    return replace(batch, targets=targets)


def data_problem(config: Any, loader: Loader, batch: AnyBatch, *, step: int) -> str:
    """Say what both sides would be wrong about alike; empty if the data is what it says.

    Args:
        config: Of the data.
        loader: Of global batches.
        batch: A step's.
        step: Steps done before this one.
    """
    size, samples = loader.global_batch_size, loader.dataset.num_samples
    here = set(loader.indices(step).tolist())
    if samples >= (step + 1) * size:
        if len(here) < size:
            return f"the data: step {step + 1} reads a sample twice, with {samples} to read"
        if step and here & set(loader.indices(step - 1).tolist()):
            return f"the data: step {step + 1} reads samples of the step before"
    if not type(config).__module__.startswith("axonlaunch.") or config.name == "custom":
        return ""  # what somebody's own targets are is not known
    if not isinstance(batch, Batch) or loader.dataset.kind != "tokens":
        return ""
    if batch.targets.shape[1] < 2:
        return ""
    counted = batch.targets[:, :-1] != IGNORE_INDEX
    follows = batch.targets[:, :-1][counted] == batch.inputs[:, 1:][counted]
    if len(follows) and float(follows.float().mean()) < _FOLLOWING:
        return "the data: targets are not the tokens that follow their inputs"
    return ""


def held_out_problem(config: Any, loader: Loader, batch: AnyBatch) -> str:
    """Say that what is held out is trained on, which both sides would do alike; empty if not.

    Args:
        config: Of the data.
        loader: Of global batches.
        batch: Held-out samples.
    """
    is_ours = type(config).__module__.startswith("axonlaunch.") and config.name != "custom"
    if not is_ours or not isinstance(batch, Batch):
        return ""
    dataset = loader.dataset
    first = np.arange(min(dataset.num_samples, dataset.num_eval_samples, _COMPARED))
    samples = dataset.samples(first, split="train")
    assert isinstance(samples, Batch)
    trained = {row.numpy().tobytes() for row in samples.inputs}
    rows = [row.numpy().tobytes() for row in batch.inputs]
    if len({*rows}) > 1 and trained.issuperset(rows):
        return "the data: every held-out sample that was looked at is one of training"
    return ""


@torch.no_grad()
def move_vectors(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Move biases, norms and whatever else has one dim away from 0 and 1, and adapters' B from 0.

    By the name alone, so that every layout moves them alike.

    Args:
        parameters: Names in the whole model, and what a rank holds: plain, or DTensors.
    """
    for name, parameter in parameters:
        starts_even = parameter.ndim == 1 or name.endswith(".lora_B.weight")
        if not starts_even or not parameter.is_floating_point() or not _numel(parameter):
            continue
        moved = _noise(name, parameter.shape) * _MOVED_BY
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        for box in local_boxes(parameter):
            region = tuple(slice(start, start + length) for start, length in box.region)
            box.of(local).add_(moved[region].to(local))


@torch.no_grad()
def roughen(parameters: Mapping[str, Tensor], *, relative: float, draw: int = 0) -> None:
    """Round parameters otherwise, in place: each element moves by at most this part of it."""
    for name, parameter in parameters.items():
        if parameter.is_floating_point():
            generator = _generator(f"{name}{draw or ''}")
            factor = 1 + relative * (torch.rand(parameter.shape, generator=generator) - 0.5)
            parameter.mul_(factor.to(parameter.dtype))


def drop_nothing(modules: Iterable[nn.Module]) -> float:
    """Turn dropout off: every layout draws it for other elements; return the largest rate."""
    largest = 0.0
    for module in (part for whole_module in modules for part in whole_module.modules()):
        if isinstance(module, _DROPOUTS):
            largest, module.p = max(largest, module.p), 0.0
        for name, value in vars(module).items():
            # What a module hands to functional.dropout: MultiheadAttention's dropout, and others'.
            if "dropout" in name and isinstance(value, float):
                largest = max(largest, value)
                setattr(module, name, 0.0)
    return largest


def _numel(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


def _noise(name: str, shape: torch.Size) -> Tensor:
    return torch.randn(tuple(shape), generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest())
    return torch.Generator().manual_seed(seed)
