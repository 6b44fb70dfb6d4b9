"""Changes batches, weights and gradients in the same way for the layout and the reference.

Regular inputs hide errors. With equal numbers of counted targets on all ranks, a mean of means
equals the mean, and adding a bias of zero twice has no effect.
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

from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.axes import degrees_of, divisor
from axonlaunch.config.options.data import IGNORE_INDEX
from axonlaunch.data.datasets.dataset import AnyBatch, Batch
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.models.specs.custom_loss import CustomLoss
from axonlaunch.models.tensors.dtensor_regions import local_boxes

_PREDICTED = 2
"""Number of samples of a prediction."""
_NOISE_DEVIATION = 0.1
"""Standard deviation of the noise that is added to biases and norms."""
_COUNTED_OF_11 = 8
"""Of 11 samples of arbitrary structure, the number that is counted."""
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def make_uneven(
    batch: AnyBatch, *, step: int, shard: int = 0, custom_loss: CustomLoss | None = None
) -> AnyBatch:
    """Mask targets; their number depends on the step and on the row's index in the global batch.

    Up to five eighths of each sequence [B, T] are masked, every fourth row of classes [B], and no
    floating-point targets. Rows of one document end with up to an eighth of padding. Of samples of
    arbitrary structure, three adjacent ones of eleven are not counted. One document of each packed
    row is split into two, at a different position in each row.

    Args:
        batch: One of the equal parts of a global batch.
        step: Index of the step.
        shard: Index of the part; 0 for a complete global batch.
        custom_loss: Custom loss, which may not support masked classes; None for the model's loss.
    """
    places = range(shard * len(batch), (shard + 1) * len(batch))
    if not isinstance(batch, Batch):
        return batch.counting((sample + step * 3) % 11 < _COUNTED_OF_11 for sample in places)
    targets = batch.targets.clone()
    length = targets.shape[-1] if targets.ndim > 1 else 1
    for row, sample in enumerate(() if targets.is_floating_point() else places):
        if targets.ndim > 1:
            targets[row, : (sample * 7 + step * 3) % 11 * length // 16] = IGNORE_INDEX
        elif sample % 4 == 3 and custom_loss is None:
            targets[row] = IGNORE_INDEX
    is_classes = targets.ndim == 2 and not targets.is_floating_point()
    if batch.positions is None and is_classes and targets.shape == batch.inputs.shape:
        is_present = torch.ones_like(targets, dtype=torch.bool)
        if batch.present is not None:
            is_present &= batch.present
        for row, sample in enumerate(places):
            end = length - (sample * 5 + step * 3) % (length // 8 + 1)
            is_present[row, end:], targets[row, end:] = False, IGNORE_INDEX
        return replace(batch, targets=targets, present=is_present)
    if batch.positions is None or batch.positions.shape[1] < 2:
        return replace(batch, targets=targets)
    # Rows with equal documents would not show that positions of another row are used.
    positions = batch.positions.clone()
    for row, sample in zip(positions, places, strict=True):
        start = 1 + (sample * 5 + step * 3) % (len(row) - 1)
        rest = row[start:]
        length = int((torch.cat((rest[1:], rest.new_zeros(1))) == 0).long().argmax()) + 1
        rest[:length] -= rest[0].clone()
    return replace(batch, targets=targets, positions=positions)


def evaluated_samples(loader: Loader) -> range:
    """Return the held-out samples of an evaluation: one and a half global batches."""
    size = loader.global_batch_size
    return range(min(loader.dataset.num_eval_samples, size + size // 2 + 1))


def predicted_samples(config: RunConfig, batch: Batch) -> Tensor:
    """Return samples for a prediction, of a length that needs padding if the layout pads.

    Args:
        config: Configuration of the layout.
        batch: Held-out samples.
    """
    samples = batch.inputs[:_PREDICTED]
    return samples[:, :-1] if shards_sequences(config) and samples.ndim == 2 else samples


def shards_sequences(config: RunConfig) -> bool:
    """Return whether a layout divides sequences and pads those with an indivisible length."""
    divided = divisor(degrees_of(config.strategy), "sequences") > 1
    return divided or config.strategy.tensor.sequence_parallel


@torch.no_grad()
def move_vectors(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Add noise to one-dimensional parameters (biases, norms) and to the B matrices of adapters.

    These start at 0 or 1. The noise depends only on the name, so it is the same in every layout.

    Args:
        parameters: Names in the full model with parameters of this rank, plain or DTensors.
    """
    for name, parameter in parameters:
        starts_constant = parameter.ndim == 1 or name.endswith(".lora_B.weight")
        if not starts_constant or not parameter.is_floating_point() or not _numel(parameter):
            continue
        noise = _seeded_normal(name, parameter.shape) * _NOISE_DEVIATION
        local = local_part(parameter)
        for box in local_boxes(parameter):
            region = tuple(slice(start, start + length) for start, length in box.region)
            box.view(local).add_(noise[region].to(local))


@torch.no_grad()
def roughen(parameters: Mapping[str, Tensor], *, relative: float, draw: int = 0) -> None:
    """Change each element of parameters by at most half of ``relative``, in place.

    This has the size of a rounding error.
    """
    for name, parameter in parameters.items():
        if parameter.is_floating_point():
            generator = _generator(f"{name}{draw or ''}")
            factor = 1 + relative * (torch.rand(parameter.shape, generator=generator) - 0.5)
            parameter.mul_(factor.to(parameter))


@torch.no_grad()
def overflow(updated: Tensor) -> None:
    """Set the first element of a parameter's gradient to infinity, on the rank that holds it."""
    assert updated.grad is not None
    gradient: Any = updated.grad
    local = local_part(gradient)
    for box in local_boxes(gradient):
        if not any(start for start, _ in box.region) and box.view(local).numel():
            box.view(local)[(0,) * local.ndim] = math.inf


class Dropout:
    """Turns a model's dropout off, except inside ``on``, because layouts draw different masks.

    Attributes:
        largest: Largest dropout rate of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._rates = [
            (module, name, value)
            for module in (part for whole_module in modules for part in whole_module.modules())
            for name, value in vars(module).items()
            # Attributes passed to functional.dropout, as in MultiheadAttention.
            if (isinstance(value, float) and "dropout" in name)
            or (isinstance(module, _DROPOUTS) and name == "p")
        ]
        self.largest = max((rate for *_, rate in self._rates), default=0.0)
        self._turn_off()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Restore the configured rates inside the context."""
        for module, name, rate in self._rates:
            setattr(module, name, rate)
        try:
            yield
        finally:
            self._turn_off()

    def _turn_off(self) -> None:
        for module, name, _ in self._rates:
            setattr(module, name, 0.0)


def _numel(parameter: Tensor) -> int:
    return local_part(parameter).numel()


def _seeded_normal(name: str, shape: torch.Size) -> Tensor:
    return torch.randn(tuple(shape), generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest())
    return torch.Generator().manual_seed(seed)
