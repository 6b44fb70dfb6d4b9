"""The reference's rounding of optimizer states and of factors of products, on full tensors.

``StateRounding`` bounds the differences that the rounding of states causes.

It is written from the definitions. The hash of bf16 is computed in 64 bits, modulo 2^32.
bitsandbytes quantizes blocks of the flat tensor. Products in 8 bits, and those of
quantization-aware training, are products of rounded numbers; in the latter, gradients pass the
rounding inside of the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from axonlaunch.config import RunConfig
from axonlaunch.config.precision import (
    Float8Format,
    MatmulFormat,
    QuantizedFormat,
    quantizes_states,
    rounds_states,
    state_format,
)
from axonlaunch.models.adapters.lora import LoraLayer
from axonlaunch.models.tensors.packed_blocks import state_values
from axonlaunch.verification.references.differences import root_mean_square
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.result import PARAMETER_FLOOR

_MODULUS = 2**32
_BLOCK, _LEAST_QUANTIZED = 64, 4096
_POSITIVE = "exp_avg_sq"
_CODE_SPACING, _LARGEST_SPACING = 2.0**-5, 2.0**-6
"""Distance of most 8-bit codes, relative to a block's root mean square and to its largest value.

There are 64 codes between 0.1 and 1 of the scale, the largest value, which is 2.5 times the root
mean square of 64 normal numbers.
"""
_COUNTERS = ("step", "mu_product")
"""Scalar states, which are in fp32 even if the parameter is a scalar too."""


def is_like_parameter(key: str, value: object, parameter: Tensor) -> bool:
    """Return whether a state has the shape of its parameter, so that its dtype can be chosen."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.shape == parameter.shape and key not in _COUNTERS


@torch.no_grad()
def round_states(optimizer: Optimizer, names: Mapping[int, str], *, seed: int, step: int) -> None:
    """Round the states of an optimizer to numbers of bf16, in place.

    Args:
        optimizer: Optimizer after its step.
        names: Names of the updated tensors by ``id``.
        seed: Seed of the run.
        step: Number of the step, from 1.
    """
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            if is_like_parameter(key, value, parameter):
                text = f"{seed}/{step}/{names[id(parameter)]}.{key}"
                value.copy_(_rounded(value, _random_numbers(value.shape, text)))


@torch.no_grad()
def quantize_states(optimizer: Optimizer) -> None:
    """Replace large states by the values that their 8-bit codes have, in place."""
    from bitsandbytes import functional

    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            if not _is_quantized(value) or not is_like_parameter(key, value, parameter):
                continue
            make: Any = functional.create_dynamic_map  # untyped in bitsandbytes
            code = make(signed=key != _POSITIVE).to(value.device)
            flat = value.reshape(-1)
            codes, scales = functional.quantize_blockwise(flat, code=code, blocksize=_BLOCK)
            kept = functional.dequantize_blockwise(codes, scales)
            value.copy_(kept.view(value.shape))


def _is_quantized(state: Tensor) -> bool:
    """Return whether a state with the shape of its parameter is stored in 8 bits."""
    is_large = state.ndim > 1 and state.numel() >= _LEAST_QUANTIZED
    return is_large and state.shape[-1] % _BLOCK == 0


def saved_values(key: str, state: Tensor) -> Tensor:
    """Return the values of a saved state, given the key that ends with its name."""
    if state.dtype is not torch.uint8:
        return state
    return state_values(state, is_positive=key.endswith(f".{_POSITIVE}"))


class StateRounding:
    """Bounds the differences that the rounding of optimizer states causes.

    Rounding errors change an unrounded state by a share ``d`` of its size. A fraction
    ``d / spacing`` of its elements is then rounded to another neighbor, at a distance of
    ``spacing``, so that the root mean square of the differences is ``sqrt(spacing * d)``. A single
    element can always be among them, also the largest one. An element of an update changes by the
    share by which its state changes. A parameter whose own states are not rounded only has other
    gradients, because these depend on all parameters.
    """

    def __init__(
        self,
        reference: Reference,
        floors: Mapping[str, float],
        *,
        spacing: float,
        of_largest: float,
    ) -> None:
        """Measure the states, and how far updates move the parameters.

        Args:
            reference: Values of one process.
            floors: Lower bound for the size of elements of each rounded state, by name.
            spacing: Distance of two neighbors relative to the root mean square.
            of_largest: Distance of two neighbors at the largest element, relative to it.
        """
        self._spacing, self._of_largest = spacing, of_largest
        self._peaks: dict[str, float] = {}
        for name, floor in floors.items():
            state = reference.states[name]
            size = max(root_mean_square([state]) + floor, 1e-300)
            self._peaks[name] = float(state.abs().max()) / size
        self._with_rounded_states = {name.rpartition(".")[0] for name in self._peaks}
        self._moves: dict[tuple[int, str], tuple[float, float]] = {}
        after = (reference.saved_step, reference.parameters), (len(reference.steps), reference.end)
        for step, parameters in after:
            for name, end in parameters.items():
                if end.is_floating_point() and end.numel():
                    moved = end.float() - reference.start[name].float()
                    size = root_mean_square([end]) + PARAMETER_FLOOR
                    mean, largest = root_mean_square([moved]), float(moved.abs().max())
                    self._moves[step, name] = mean / size, largest / size

    def __contains__(self, name: str) -> bool:
        return name in self._peaks

    def allowed_in_state(self, name: str, unrounded: float, *, count: int) -> float:
        """Return the relative difference of a rounded state.

        Args:
            name: Name of the state.
            unrounded: Relative difference before rounding.
            count: Number of elements that are compared.
        """
        one = self._of_largest * self._peaks[name] / math.sqrt(count)
        return math.sqrt(self._spacing * unrounded) + one

    def allowed_in_parameter(
        self, name: str, step: int, *, unrounded: float, gradient: float, count: int
    ) -> float:
        """Return the relative difference of a parameter that rounded states cause.

        Args:
            name: Name of the parameter.
            step: Number of updates.
            unrounded: Relative difference of its states before rounding.
            gradient: Relative difference of its gradients.
            count: Number of elements that are compared.
        """
        mean, largest = self._moves.get((step, name), (0.0, 0.0))
        if name not in self._with_rounded_states:
            return gradient * mean
        one = self._spacing * largest / math.sqrt(count)
        return math.sqrt(self._spacing * unrounded) * mean + one


def state_rounding(
    config: RunConfig, reference: Reference, *, floors: Mapping[str, float]
) -> StateRounding | None:
    """Return the effect of rounded states in a run; None if its states are not rounded.

    Args:
        config: Configuration of the layout.
        reference: Values of one process.
        floors: Lower bound for the size of elements, by kind of state.
    """
    if not rounds_states(config.optimizer):
        return None
    is_quantized, stored = quantizes_states(config.optimizer), state_format(config.optimizer)
    if is_quantized or stored is None:
        spacing, of_largest = _CODE_SPACING, _LARGEST_SPACING
    else:
        spacing = of_largest = 2 * stored.roundoff
    rounded = {
        name: floors.get(name.rpartition(".")[2], 0.0)
        for name, state in reference.states.items()
        if state.numel()
        and (_is_quantized(state) if is_quantized else state.itemsize < torch.float32.itemsize)
    }
    return StateRounding(reference, rounded, spacing=spacing, of_largest=of_largest)


def _rounded(values: Tensor, numbers: Tensor) -> Tensor:
    """Return fp32 numbers after adding 16 random bits below bf16's last bit and cutting off."""
    bits = values.contiguous().view(torch.int32).cpu().to(torch.int64) % _MODULUS
    kept = (bits + numbers % 2**16) // 2**16 * 2**16 % _MODULUS
    signed = torch.where(kept >= 2**31, kept - _MODULUS, kept)
    rounded = signed.to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite().cpu(), rounded, values.cpu())


def _random_numbers(shape: torch.Size, text: str) -> Tensor:
    """Return the random number of each element: a hash of the text and of its indices."""
    numbers = torch.tensor(int.from_bytes(blake2b(text.encode(), digest_size=4).digest()))
    for size in shape:
        numbers = _lowbias32((numbers[..., None] + torch.arange(size)) % _MODULUS)
    return numbers


def _lowbias32(numbers: Tensor) -> Tensor:
    """Return Wellons's hash of 32 bits (2018) of each number."""
    numbers = (numbers ^ (numbers >> 16)) * 0x7FEB352D % _MODULUS
    numbers = (numbers ^ (numbers >> 15)) * 0x846CA68B % _MODULUS
    return numbers ^ (numbers >> 16)


def round_factors(layers: Iterable[nn.Module], chosen: MatmulFormat) -> None:
    """Make linear layers multiply rounded factors, in forward and backward.

    Args:
        layers: Linear layers of the full model.
        chosen: Format of the factors.
    """
    for layer in layers:
        layer.forward = partial(_rounded_linear, layer, chosen)


@contextmanager
def without_rounded_factors(model: nn.Module) -> Iterator[None]:
    """Undo ``round_factors`` inside."""
    rounded = {m: m.__dict__.pop("forward") for m in model.modules() if _rounds(m)}
    try:
        yield
    finally:
        for module, forward in rounded.items():
            module.forward = forward


def _rounds(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _rounded_linear


def _rounded_linear(layer: Any, chosen: MatmulFormat, x: Tensor) -> Tensor:
    weight: Tensor = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if isinstance(chosen, QuantizedFormat):
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        inputs, weights = _quantized_input(x, chosen), _quantized_weight(weight, chosen)
        output = F.linear(inputs, weights.to(x.dtype), bias)
    else:
        output = _RoundedProduct.apply(x, weight, chosen)  # type: ignore[no-untyped-call]
        output = output if layer.bias is None else output + layer.bias.to(output.dtype)
    return layer.adapt(output, x, layer._read) if isinstance(layer, LoraLayer) else output


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chosen: Float8Format) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chosen = chosen
        inputs = _rounded_factor(x.flatten(0, -2), chosen, dim=1)
        product = inputs @ _rounded_factor(weight, chosen, dim=1).t()
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rounded = partial(_rounded_factor, chosen=ctx.chosen)
        rows = gradient.flatten(0, -2)
        of_input = rounded(rows, is_gradient=True, dim=1) @ rounded(weight, dim=0)
        of_weight = rounded(rows, is_gradient=True, dim=0).t() @ rounded(x.flatten(0, -2), dim=0)
        return of_input.view(x.shape).to(x.dtype), of_weight.to(weight.dtype), None


def _rounded_factor(
    factor: Tensor, chosen: Float8Format, *, dim: int, is_gradient: bool = False
) -> Tensor:
    """Return a factor's values after rounding, in fp32 or fp64.

    Args:
        factor: Matrix of the product, with the dims that it has there.
        chosen: Format of the factors.
        dim: Dim that the product sums over, along which numbers share a scale if rows have scales.
        is_gradient: Whether the factor is a gradient.
    """
    dtype: torch.dtype = getattr(torch, chosen.gradient_dtype if is_gradient else chosen.dtype)
    sizes = factor.abs().double()
    largest = sizes.amax(dim, keepdim=True) if chosen.is_rowwise else sizes.amax()
    exponent = torch.log2(torch.finfo(dtype).max / largest.clamp(min=1e-12)).floor()
    rounded = torch.ldexp(factor.double(), exponent).to(dtype).double()
    kept = torch.float64 if factor.dtype is torch.float64 else torch.float32
    return torch.ldexp(rounded, -exponent).to(kept)


class _Passing(torch.autograd.Function):
    """Replaces numbers; passes their gradients where the replacement is inside of the range."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, replaced: Tensor, is_inside: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(is_inside)
        return replaced

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (is_inside,) = ctx.saved_tensors
        return torch.where(is_inside, gradient, 0), None, None


def _quantized_input(x: Tensor, chosen: QuantizedFormat) -> Tensor:
    """Return the values of inputs [..., in] as integers with a zero point, with their gradient."""
    steps = 2**chosen.input_bits - 1
    values = x.detach() if x.dtype is not torch.float64 else x.detach().float()
    least = values.min(-1, keepdim=True).values.minimum(values.new_zeros(()))
    most = values.max(-1, keepdim=True).values.maximum(values.new_zeros(()))
    size = ((most - least) / steps).maximum(values.new_tensor(2.0**-23))
    below_zero = (least / size).round().neg().clamp(0, steps).float()
    number = (values * (1 / size.float())).round() + below_zero  # from 0 to steps
    is_inside = (number >= 0) & (number <= steps)
    kept = (number.clamp(0, steps) - below_zero) * size.float()
    return _passing(x, kept.to(x.dtype), is_inside)


def _quantized_weight(weight: Tensor, chosen: QuantizedFormat) -> Tensor:
    """Return the values of a weight [out, in] as integers of groups, with their gradient."""
    most = 2 ** (chosen.weight_bits - 1)
    values = weight.detach() if weight.dtype is not torch.float64 else weight.detach().float()
    rows = values.reshape(-1, chosen.input_multiple)
    size = rows.abs().amax(1, keepdim=True) / (most - 0.5)
    size = size.maximum(rows.new_tensor(torch.finfo(rows.dtype).smallest_normal)).float()
    number = (rows * (1 / size)).round()
    is_inside = (number >= -most) & (number < most)
    kept = number.clamp(-most, most - 1) * size
    shape = weight.shape
    return _passing(weight, kept.to(weight.dtype).view(shape), is_inside.view(shape))


def _passing(numbers: Tensor, replaced: Tensor, is_inside: Tensor) -> Tensor:
    result: Tensor = _Passing.apply(numbers, replaced, is_inside)  # type: ignore[no-untyped-call]
    return result
