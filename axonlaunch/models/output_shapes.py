"""Shapes of what each module of a whole model returns, found on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.initialization import materialize
from axonlaunch.models.output_regions import first_floating

_SAMPLES = 3
"""Of the batch: a size that no other dim is likely to have."""


@dataclass(frozen=True)
class OutputShape:
    """What a module returns of a batch.

    Attributes:
        of_samples: Whether its first dim is the batch's.
        shape: Of all of it, or where it is of samples of one.
    """

    of_samples: bool
    shape: tuple[int, ...]

    def whole(self, samples: int) -> tuple[int, ...]:
        """Return the shape for so many samples."""
        return (samples, *self.shape) if self.of_samples else self.shape


def output_shapes(model: nn.Module, sample: Tensor) -> dict[str, OutputShape]:
    """Return the shape of each module's output, by its name.

    A module that is called several times, or that returns no tensor of numbers, is not in it; nor
    is any of a model that can't be run without values.

    Args:
        model: Whole, on the meta device; it is used up.
        sample: One sample's inputs, of which shape and type count.
    """
    seen: dict[str, list[OutputShape]] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = first_floating(output)
            if tensor is not None:
                of_samples = tensor.ndim > 0 and len(tensor) == _SAMPLES
                shape = tuple(tensor.shape[1:] if of_samples else tensor.shape)
                seen.setdefault(name, []).append(OutputShape(of_samples, shape))

        return note

    silence_fake_tensors()
    try:
        with torch.no_grad(), fake_tensor_mode():
            materialize(model, device="cpu")
            for name, module in model.named_modules():
                module.register_forward_hook(noting(name))
            model(torch.empty((_SAMPLES, *sample.shape), dtype=sample.dtype))
    except Exception:  # a model of others may fail in any way without values
        return {}
    return {name: calls[0] for name, calls in seen.items() if name and len(calls) == 1}
