"""The reference's rounding of optimizer states to bf16 and to 8 bits, on full tensors.

Written from the definitions: the hash of bf16 is computed in 64 bits, modulo 2^32; bitsandbytes
quantizes blocks of the flat tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from axonlaunch.models.tensors.packed_blocks import state_values

_MODULUS = 2**32
_BLOCK, _LEAST_QUANTIZED = 64, 4096
_POSITIVE = "exp_avg_sq"
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
            is_large = parameter.ndim > 1 and parameter.numel() >= _LEAST_QUANTIZED
            is_whole = is_large and parameter.shape[-1] % _BLOCK == 0
            if not is_whole or not is_like_parameter(key, value, parameter):
                continue
            make: Any = functional.create_dynamic_map  # untyped in bitsandbytes
            code = make(signed=key != _POSITIVE).to(value.device)
            flat = value.reshape(-1)
            codes, scales = functional.quantize_blockwise(flat, code=code, blocksize=_BLOCK)
            kept = functional.dequantize_blockwise(codes, scales)
            value.copy_(kept.view(value.shape))


def saved_values(key: str, state: Tensor) -> Tensor:
    """Return the values of a saved state, given the key that ends with its name."""
    if state.dtype is not torch.uint8:
        return state
    return state_values(state, is_positive=key.endswith(f".{_POSITIVE}"))


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
