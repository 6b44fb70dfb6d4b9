"""The magnitudes of DoRA: an adapted weight is scaled to a trained norm, output by output.

Of a layer with the weight W, whose adapter adds ``scale * B A``, output i is that of
``m[i] * (W + scale * B A)[i] / ||(W + scale * B A)[i]||``; the norm gets no gradient.

Source: Liu et al., "DoRA", 2024, section 4.3; huggingface/peft, ``tuners/lora/dora.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from axonlaunch.config.adapter import MAGNITUDE
from axonlaunch.models.dtensor_regions import local_boxes, squares_along


class LoraMagnitude(nn.Module):
    """The norms that an adapted layer's outputs are to have.

    Attributes:
        weight: One for each output, [outputs].
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    def forward(self, norms: Tensor, own: tuple[int, int] | None = None) -> Tensor:
        """Return what outputs are multiplied by.

        Args:
            norms: Those of the adapted weight, [outputs].
            own: First and number of the outputs that they are of; None: all.
        """
        weight = self.weight if own is None else self.weight.narrow(0, *own)
        return weight / norms


@torch.no_grad()
def adapted_norms(
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    scale: float,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the norm of each row of ``weight + scale * up @ down``, in fp32 at the least.

    Args:
        weight: Of the layer, [outputs, inputs].
        down: A, [rank, inputs].
        up: B, [outputs, rank].
        scale: Of the product.
        total: Sums the rows' squares over ranks that have other inputs; None: all are here.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    device = weight.device.type
    # There is no autocast on meta, where a stage's shapes are found.
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        adapted = torch.mm(up.to(dtype), down.to(dtype)).mul_(scale).add_(weight)
        norms = torch.linalg.vector_norm(adapted, dim=1)
        return norms if total is None else total(norms.square()).sqrt()


@torch.no_grad()
def fill_magnitudes(state: Mapping[str, Tensor], *, transposed: Container[str]) -> None:
    """Set magnitudes to the norms of the layers' weights, in place, as they are where B is zero.

    Args:
        state: A rank's parameters by name, divided ones as DTensors; all ranks call this.
        transposed: Names of layers whose weight is [inputs, outputs].
    """
    for name, magnitude in state.items():
        if not name.endswith(MAGNITUDE):
            continue
        layer = name.removesuffix(MAGNITUDE)
        squares = squares_along(state[f"{layer}.weight"], dim=0 if layer in transposed else 1)
        local = magnitude.to_local() if hasattr(magnitude, "to_local") else magnitude
        for box in local_boxes(magnitude):
            [(start, length)] = box.region
            box.of(local).copy_(squares[start : start + length].sqrt())
