"""What both sides of a comparison are fed: uneven targets, and weights that start nowhere special.

Even ones hide errors: with as many counted targets everywhere a mean of means is the mean, and a
bias of zero may be added as often as one likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.config import RunConfig
from axonlaunch.config.axes import degrees_of, divisor
from axonlaunch.config.data import IGNORE_INDEX
from axonlaunch.data.dataset import AnyBatch, Batch
from axonlaunch.data.loader import Loader
from axonlaunch.models.dtensor_regions import local_boxes
from axonlaunch.models.own_loss import OwnLoss

_PREDICTED = 2
"""Samples of a prediction."""
_MOVED_BY = 0.1
"""Deviation of what is added to biases and norms."""
_COUNTED_OF_11 = 8
"""Samples of any structure that count."""
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def uneven(batch: AnyBatch, *, step: int, shard: int = 0, own: OwnLoss | None = None) -> AnyBatch:
    """Leave targets out, as many as a row's place in the global batch and the step say.

    Of sequences [B, T] up to five eighths of each, of classes [B] every fourth row, of floats none;
    of samples of any structure, whose targets nobody knows, three of eleven samples, side by side.
    One document of a packed row becomes two, elsewhere in each row.

    Args:
        batch: One of the equal parts of a global batch.
        step: Which global batch it is.
        shard: Which part; 0 where it is all of it.
        own: A loss of one's own, which knows of no class that stands for none; None: the model's.
    """
    places = range(shard * len(batch), (shard + 1) * len(batch))
    if not isinstance(batch, Batch):
        return batch.counting((place + step * 3) % 11 < _COUNTED_OF_11 for place in places)
    targets = batch.targets.clone()
    for row, place in enumerate(() if targets.is_floating_point() else places):
        if targets.ndim > 1:
            length = targets.shape[1]
            targets[row, : (place * 7 + step * 3) % 11 * length // 16] = IGNORE_INDEX
        elif place % 4 == 3 and own is None:
            targets[row] = IGNORE_INDEX
    if batch.positions is None or batch.positions.shape[1] < 2:
        return replace(batch, targets=targets)
    # Rows of one division would not show whose positions somebody computes with.
    positions = batch.positions.clone()
    for row, place in zip(positions, places, strict=True):
        begins = 1 + (place * 5 + step * 3) % (len(row) - 1)
        rest = row[begins:]
        ends = int((torch.cat((rest[1:], rest.new_zeros(1))) == 0).long().argmax()) + 1
        rest[:ends] -= rest[0].clone()
    return replace(batch, targets=targets, positions=positions)


def evaluated_samples(loader: Loader) -> range:
    """Return the held-out samples of an evaluation: a global batch, and a part of another."""
    size = loader.global_batch_size
    return range(min(loader.dataset.num_eval_samples, size + size // 2 + 1))


def predicted_samples(config: RunConfig, batch: Batch) -> Tensor:
    """Return the samples of a prediction; of a length that the layout pads, where it pads any.

    Args:
        config: The layout's.
        batch: Held-out samples.
    """
    samples = batch.inputs[:_PREDICTED]
    return samples[:, :-1] if cuts_sequences(config) and samples.ndim == 2 else samples


def cuts_sequences(config: RunConfig) -> bool:
    """Say whether a layout divides sequences, and pads those whose length it does not divide."""
    divided = divisor(degrees_of(config.strategy), "sequences") > 1
    return divided or config.strategy.tensor.sequence_parallel


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
            parameter.mul_(factor.to(parameter))


@torch.no_grad()
def overflow(updated: Tensor) -> None:
    """Put infinity where the first element of a parameter's gradient is, if this rank holds it."""
    assert updated.grad is not None
    gradient: Any = updated.grad
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    for box in local_boxes(gradient):
        if not any(start for start, _ in box.region) and box.of(local).numel():
            box.of(local)[(0,) * local.ndim] = math.inf


class Dropout:
    """A model's dropout, off but inside of ``on``: every layout draws it for other elements.

    Attributes:
        largest: Its largest rate.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._rates = [
            (module, name, value)
            for module in (part for whole_module in modules for part in whole_module.modules())
            for name, value in vars(module).items()
            # What a module hands to functional.dropout: MultiheadAttention's dropout, and others'.
            if (isinstance(value, float) and "dropout" in name)
            or (isinstance(module, _DROPOUTS) and name == "p")
        ]
        self.largest = max((rate for *_, rate in self._rates), default=0.0)
        self._turn_off()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Restore the model's dropout inside; an evaluation must not draw any."""
        for module, name, rate in self._rates:
            setattr(module, name, rate)
        try:
            yield
        finally:
            self._turn_off()

    def _turn_off(self) -> None:
        for module, name, _ in self._rates:
            setattr(module, name, 0.0)


def _numel(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


def _noise(name: str, shape: torch.Size) -> Tensor:
    return torch.randn(tuple(shape), generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest())
    return torch.Generator().manual_seed(seed)
