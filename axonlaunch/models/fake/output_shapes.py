"""Finds the output shape of each module of an unsharded model by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.fake.output_regions import first_floating
from axonlaunch.models.tensors.initialization import materialize

_SAMPLES = 3
"""Batch size of the run; no other dimension is likely to have this size."""


@dataclass(frozen=True)
class OutputShape:
    """Output shape of one module.

    Attributes:
        of_samples: Whether the first dimension is the batch dimension.
        shape: Full shape, or the shape without the batch dimension if ``of_samples`` is true.
    """

    of_samples: bool
    shape: tuple[int, ...]

    def full(self, samples: int) -> tuple[int, ...]:
        """Return the full shape for a batch of ``samples``."""
        return (samples, *self.shape) if self.of_samples else self.shape


def output_shapes(model: nn.Module, sample: Tensor) -> dict[str, OutputShape]:
    """Return the output shape of each module by its name.

    Modules that are called several times or return no floating-point tensor are left out. The
    result is empty if the model can't run on tensors without values.

    Args:
        model: Unsharded model on the meta device. It must not be used afterwards.
        sample: Input of one sample; only its shape and dtype matter.
    """
    shapes_by_name: dict[str, list[OutputShape]] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = first_floating(output)
            if tensor is not None:
                of_samples = tensor.ndim > 0 and len(tensor) == _SAMPLES
                shape = tuple(tensor.shape[1:] if of_samples else tensor.shape)
                shapes_by_name.setdefault(name, []).append(OutputShape(of_samples, shape))

        return record

    silence_fake_tensors()
    try:
        with torch.no_grad(), fake_tensor_mode():
            materialize(model, device="cpu")
            for name, module in model.named_modules():
                module.register_forward_hook(hook_for(name))
            model(torch.empty((_SAMPLES, *sample.shape), dtype=sample.dtype))
    except Exception:  # a user's model may fail in any way on tensors without values
        return {}
    return {name: shapes[0] for name, shapes in shapes_by_name.items() if name and len(shapes) == 1}
