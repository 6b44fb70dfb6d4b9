"""The reference's rounding of optimizer states to bf16, on full tensors.

Written from the definition: the hash is computed in 64 bits, modulo 2^32.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor
from torch.optim import Optimizer

_MODULUS = 2**32
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


def _rounded(values: Tensor, numbers: Tensor) -> Tensor:
    """Return fp32 numbers after adding 16 random bits below bf16's last bit and cutting off."""
    bits = values.contiguous().view(torch.int32).cpu().to(torch.int64) % _MODULUS
    kept = (bits + numbers % 2**16) // 2**16 * 2**16 % _MODULUS
    signed = torch.where(kept >= 2**31, kept - _MODULUS, kept)
    return signed.to(torch.int32).view(torch.float32)


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
