"""Computes DoRA's magnitudes, which scale each output of an adapted weight to a trained norm.

For a layer with the weight W and an adapter that adds ``scale * B A``, the weight of output i is
``m[i] * (W + scale * B A)[i] / ||(W + scale * B A)[i]||``. No gradient passes through the norm.

Source: Liu et al., "DoRA", 2024, section 4.3; huggingface/peft, ``tuners/lora/dora.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from axonlaunch.comm.mesh import local_part
from axonlaunch.config.options.adapter import MAGNITUDE
from axonlaunch.models.tensors.dtensor_regions import local_boxes, squares_along
from axonlaunch.models.tensors.packed_blocks import format_of

_FP32 = torch.float32


class LoraMagnitude(nn.Module):
    """Trained norms of an adapted layer's weight, one for each output.

    Attributes:
        weight: Norms, [outputs].
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    def forward(self, norms: Tensor, output_range: tuple[int, int] | None = None) -> Tensor:
        """Return the factors by which outputs are multiplied.

        Args:
            norms: Norms of the adapted weight, [outputs].
            output_range: First output and number of outputs in ``norms``; None means all outputs.
        """
        weight = self.weight if output_range is None else self.weight.narrow(0, *output_range)
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
    """Return the norm of each row of ``weight + scale * up @ down``, in fp32 or higher.

    Args:
        weight: Weight of the layer, [outputs, inputs].
        down: A, [rank, inputs].
        up: B, [outputs, rank].
        scale: Factor of the product.
        total: Sums squares over the ranks that hold other inputs; None if this rank holds all
            inputs.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    device = weight.device.type
    # Autocast does not exist on the meta device, which is used to find the shapes of a stage.
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        # Selective recomputation saves results of ``mm``, which must not change then.
        product = torch.bmm(up.to(dtype)[None], down.to(dtype)[None])[0]
        adapted = product.mul_(scale).add_(weight)
        norms = torch.linalg.vector_norm(adapted, dim=1)
        return norms if total is None else total(norms.square()).sqrt()


@torch.no_grad()
def fill_magnitudes(state: Mapping[str, Tensor], *, transposed: Container[str]) -> None:
    """Set magnitudes in place to the norms of the layers' weights; correct while B is zero.

    All ranks must call this.

    Args:
        state: This rank's parameters by name; sharded parameters are DTensors.
        transposed: Names of layers with a weight of shape [inputs, outputs].
    """
    for name, magnitude in state.items():
        if not name.endswith(MAGNITUDE):
            continue
        layer = name.removesuffix(MAGNITUDE)
        weight, dim = state[f"{layer}.weight"], 0 if layer in transposed else 1
        if (stored := format_of(weight)) is None:
            squares = squares_along(weight, dim=dim)
        else:
            squares = squares_along(weight, dim=dim, read=partial(stored.dequantize, dtype=_FP32))
        local = local_part(magnitude)
        for box in local_boxes(magnitude):
            [(start, length)] = box.region
            box.view(local).copy_(squares[start : start + length].sqrt())
