"""Computes matrix products of linear layers with factors rounded like those of a quantized model.

This is quantization-aware training: forward rounds inputs and weights to the values that they will
have as integers, and the product has the type of the input. Gradients pass the rounding unchanged,
except where a number exceeded the range of the integers: there they are zero.

An input has one scale and one zero point for each token, from the smallest and the largest number
of all features. A weight has a scale for each group of consecutive inputs. If tensor ranks divide
the features of an input, they exchange the two numbers of each token; groups are never divided.
Therefore every layout rounds like one process.

Values and the places of zero gradients are those of torchao's ``Int8DynActInt4WeightQATLinear``, a
class that replaces ``nn.Linear``. Operations are in its order: the largest weight of a group is
half of a step above the largest integer, so the last digit decides its rounding.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018; pytorch/ao, ``torchao/quantization/qat``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import max_over
from axonlaunch.config.precision import QuantizedFormat
from axonlaunch.engines.precision.autocast import in_autocast_dtype
from axonlaunch.engines.precision.torch_internals import needs_gradient

_LEAST = 2.0**-23
"""Smallest scale of an input."""


class RoundingStart:
    """Decides whether the products of an engine round in a step.

    Attributes:
        is_on: Whether they round; compiled blocks are compiled again when it changes.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._first_step = first_step
        self.is_on = not first_step

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.is_on = step >= self._first_step


class QuantizedProducts:
    """Products of a linear layer with rounded factors, used in place of ``F.linear``."""

    def __init__(
        self,
        chosen: QuantizedFormat,
        group: ProcessGroup | None = None,
        start: RoundingStart | None = None,
    ) -> None:
        """Create the function.

        Args:
            chosen: Format that factors are rounded to.
            group: Ranks that have other features of the same inputs; None if inputs are complete.
            start: Decides about each step; None rounds in all.
        """
        self._start = start or RoundingStart()
        self._input_range = _range(chosen.input_bits)
        self._weight_range = _range(chosen.weight_bits)
        self._group_size = chosen.input_multiple
        self._group = group

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out] with a weight [out, in], in the type of ``x``."""
        x, weight = in_autocast_dtype(x, weight)
        bias = None if bias is None else bias.to(x.dtype)
        if not self._start.is_on or not x.numel():  # nothing has no largest number
            return F.linear(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            # Views, as in ``ScaledProducts``.
            factors = x.view_as(x), weight.view_as(weight), bias
            return cast("Tensor", _apply(*factors, *self._input_scale(x.detach()), self))

    def _input_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point [..., 1] of each token, in fp32. Zero has a code."""
        lowest, highest = torch.aminmax(x, dim=-1, keepdim=True)
        if x.dtype == torch.float16:  # the difference may exceed the largest number of fp16
            lowest, highest = lowest.float(), highest.float()
        if self._group is not None:
            lowest, highest = max_over(torch.stack((-lowest, highest)), self._group)
            lowest = -lowest
        lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
        first, last = self._input_range
        scale = ((highest - lowest) / (last - first)).clamp(min=_LEAST)
        zero = (first - (lowest / scale).round()).clamp(first, last)
        return scale.float(), zero.float()

    def _in_groups(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weight as [out, groups, inputs of a group], and scales [out, groups, 1]."""
        groups = weight.unflatten(-1, (-1, self._group_size))
        first, last = self._weight_range
        largest = torch.linalg.vector_norm(groups, torch.inf, -1, keepdim=True)
        scale = largest / ((last - first) / 2)
        return groups, scale.clamp(min=torch.finfo(weight.dtype).smallest_normal).float()

    def rounded_input(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return inputs [..., in] after rounding."""
        codes = _codes(x, scale).add_(zero).clamp_(*self._input_range)
        return codes.sub_(zero).mul_(scale).to(x.dtype)

    def rounded_weight(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in] after rounding."""
        groups, scale = self._in_groups(weight)
        codes = _codes(groups, scale).clamp_(*self._weight_range)
        return codes.mul_(scale).to(weight.dtype).flatten(-2)

    def through_input(self, gradient: Tensor, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the gradient of inputs, given that of rounded ones [..., in]."""
        return _inside(gradient, _codes(x, scale).add_(zero), self._input_range)

    def through_weight(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of a weight, given that of the rounded one [out, in]."""
        groups, scale = self._in_groups(weight)
        return _inside(gradient, _codes(groups, scale).flatten(-2), self._weight_range)


def _range(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest integer of some bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    """Return integers in fp32, before they are limited to the range."""
    return (values * scale.reciprocal()).round_()


def _inside(gradient: Tensor, codes: Tensor, limits: tuple[int, int]) -> Tensor:
    """Return a gradient with zeros where codes exceed the range."""
    first, last = limits
    return gradient.masked_fill((codes < first) | (codes > last), 0.0)


class _QuantizedProduct(torch.autograd.Function):
    """Rounds again in backward, so that rounded factors are not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        zero: Tensor,
        products: QuantizedProducts,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, scale, zero)
        ctx.products = products
        inputs = products.rounded_input(x, scale, zero)
        return F.linear(inputs, products.rounded_weight(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scale, zero = ctx.saved_tensors
        products: QuantizedProducts = ctx.products
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input, of_weight, of_bias = None, None, None
        if needs_gradient(ctx, 0):
            of_input = (rows @ products.rounded_weight(weight)).view(x.shape)
            of_input = products.through_input(of_input, x, scale, zero)
        if needs_gradient(ctx, 1):
            inputs = products.rounded_input(x, scale, zero)
            of_weight = rows.t() @ inputs.reshape(-1, x.shape[-1])
            of_weight = products.through_weight(of_weight, weight)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias, None, None, None


_apply: Any = _QuantizedProduct.apply
