"""Computes matrix products of linear layers in 8-bit floating point.

Both factors of a product are multiplied by scales, rounded to 8 bits and multiplied; the result is
divided by the scales. A scale maps the largest magnitude of a tensor, or of a row along the summed
dim, close to the largest number of the format. For products of integers' values, see
``quantized_products``.

Scales are powers of two, so they change exponents and no digits. A number is rounded alike whatever
other numbers share its scale, unless it is smaller than 2^-14 of the largest of them (2^-29 in
e5m2). Therefore ranks that have a part of a factor, some samples or some columns, need no common
scale to compute what one process computes, and sizes of micro-batches don't matter. Scales that are
not powers of two would have to be maxima over all these ranks, found by an exchange before each
product.

torchao has the same recipes (``convert_to_float8_training``), but only as modules in place of
``nn.Linear``, and its functions are not public; ``rounded_layers`` applies these to sharded layers
too.

Source: pytorch/ao, ``torchao/float8``: ``Float8LinearConfig.from_recipe_name``, and
``round_scales_to_power_of_2``; Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from axonlaunch.config.precision import Float8Format
from axonlaunch.engines.precision.autocast import in_autocast_dtype
from axonlaunch.engines.precision.torch_internals import needs_gradient

_LEAST = 1e-12
"""Smallest magnitude that a scale maps to the largest number, torchao's ``EPS``."""
_EXPONENT = 0x7F800000
"""Bits of the exponent of an fp32 number."""


class ScaledProducts:
    """Products of a linear layer in an 8-bit format, used in place of ``F.linear``."""

    def __init__(self, chosen: Float8Format) -> None:
        self._is_rowwise = chosen.is_rowwise
        self._dtype = getattr(torch, chosen.dtype)
        self._gradient_dtype = getattr(torch, chosen.gradient_dtype)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out] with a weight [out, in], in the type of ``x``."""
        x, weight = in_autocast_dtype(x, weight)
        if not x.numel():  # has no largest magnitude
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        with torch.autocast(
            x.device.type, enabled=False
        ):  # of the fp32 that the CPU's kernel sums in
            # Views, because autograd does not say whether it needs the gradient of a leaf.
            output = cast("Tensor", _apply(x.view_as(x), weight.view_as(weight), self))
        return output if bias is None else output + bias.to(output.dtype)

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x @ weight.T``."""
        # The tensor cores of Hopper may sum with fewer digits, as in torchao's recipes.
        return self._multiply(x, weight, self._dtype, is_fast=True)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return ``gradient @ weight``."""
        return self._multiply(gradient, weight.t(), self._gradient_dtype)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return ``gradient.T @ x``."""
        return self._multiply(gradient.t(), x.t(), self._gradient_dtype)

    def _multiply(
        self, left: Tensor, right: Tensor, dtype: torch.dtype, *, is_fast: bool = False
    ) -> Tensor:
        """Return ``left @ right.T`` for [M, K] and [N, K], in the type of ``right``.

        Args:
            left: The left factor.
            right: The right factor, which is rounded to the format of weights and activations.
            dtype: 8-bit type of the left factor.
            is_fast: Whether tensor cores may sum with fewer digits.
        """
        result = right.dtype
        a, a_scale = self.round_factor(left, dtype)
        b, b_scale = self.round_factor(right, self._dtype)
        if not self._is_rowwise:
            return _scaled_mm(a, b, a_scale, b_scale, result, is_fast=is_fast)
        if is_fast and result is torch.bfloat16:
            kind = ScalingType.RowWise
            return _scaled_mm(a, b, a_scale, b_scale, result, is_fast=True, kind=kind)
        # torch's kernel with a scale for each row returns only bf16, and is slow if it sums with
        # all digits. The result before the scales may exceed fp16.
        one = torch.ones((), device=a.device)
        unscaled = torch.float32 if result is torch.float16 else result
        product = _scaled_mm(a, b, one, one, unscaled)
        # Powers of two are exact in every type. Recomputation may have kept the product itself.
        return (product * a_scale.to(unscaled)).mul_(b_scale.t().to(unscaled)).to(result)

    def round_factor(self, matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Round a factor [M, K]; return it with rows in memory, and the inverse of its scales."""
        dim = 1 if self._is_rowwise else None
        largest = torch.linalg.vector_norm(matrix, torch.inf, dim, keepdim=dim is not None).float()
        # Without torch.clamp: inductor's minima and maxima make Triton store wrong bytes in kernels
        # that also transpose 8-bit numbers (triton-lang/triton#11111).
        ratio = torch.finfo(dtype).max / torch.where(largest > _LEAST, largest, _LEAST)
        scale = (ratio.view(torch.int32) & _EXPONENT).view(torch.float32)
        rounded = (matrix.float() * scale).to(dtype).contiguous()
        return rounded, scale.reciprocal()


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    *,
    is_fast: bool = False,
    kind: ScalingType = ScalingType.TensorWise,
) -> Tensor:
    """Return the scaled ``a @ b.T``; K is padded with zeros to a multiple of 16, for the kernel."""
    if missing := -a.shape[1] % 16:
        a, b = F.pad(a, (0, missing)), F.pad(b, (0, missing))
    scales = a_scale, kind, b_scale if b_scale.ndim == 0 else b_scale.t(), kind
    return F.scaled_mm(a, b.t(), *scales, output_dtype=dtype, use_fast_accum=is_fast)


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: ScaledProducts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        output = products.output(x.reshape(-1, x.shape[-1]), weight)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        products: ScaledProducts = ctx.products
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input, of_weight = None, None
        if needs_gradient(ctx, 0):
            of_input = products.input_gradient(rows, weight).view(x.shape)
        if needs_gradient(ctx, 1):
            of_weight = products.weight_gradient(rows, x.reshape(-1, x.shape[-1]))
        return of_input, of_weight, None


_apply: Any = _ScaledProduct.apply
