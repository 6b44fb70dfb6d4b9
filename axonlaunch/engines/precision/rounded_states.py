"""Optimizer states that are stored in bf16 between updates, rounded up or down at random.

The update computes in fp32. Its numbers are rounded to the nearest one only where they are weights.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from axonlaunch.models.tensors.dtensor_regions import local_boxes

_DROPPED = 0xFFFF
"""Bits of an fp32 number that bf16 does not have."""
_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Odd factors of the hash, as int32."""


class RoundedStates:
    """Rounds states to bf16 at random, the same in every layout.

    An fp32 number between two neighboring bf16 numbers becomes the upper one with a probability
    equal to its distance from the lower one, so sums of small changes are kept on average. The
    random number of an element depends on the seed, the step, the names of parameter and state, and
    the indices of the element in the full tensor.

    Attributes:
        step: Number of the step, from 1.

    Source: Zamirai et al., "Revisiting BFloat16 Training", 2020; the hash: Wellons, "Prospecting
    for Hash Functions", 2018 (lowbias32).
    """

    def __init__(self, *, seed: int) -> None:
        """Create the rounding of a run's states.

        Args:
            seed: Seed of the run.
        """
        self.step = 0
        self._seed = seed

    def round(self, name: str, value: Tensor, full: Tensor) -> Tensor:
        """Return this rank's part of an updated state in bf16.

        Args:
            name: Name of the state, with that of its parameter in the full model.
            value: This rank's part of the state in fp32.
            full: Tensor with the shape and the placements of the state.
        """
        bits = element_bits(full, f"{self._seed}/{self.step}/{name}", device=value.device)
        return round_to_bf16(value, bits)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers to bf16: add random numbers below the last kept bit, and cut off.

    Args:
        values: Numbers in fp32.
        bits: Random int32 of the same shape, of which the lower half is used.
    """
    numbers = (bits & _DROPPED).add_(values.view(torch.int32)).bitwise_and_(~_DROPPED)
    # With the strides of the values, as fused kernels require.
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    # Added to the bits of NaN, a random number could give a number.
    return rounded.copy_(torch.where(values.isfinite(), numbers.view(torch.float32), values))


def element_bits(full: Tensor, key: str, *, device: torch.device) -> Tensor:
    """Return a random int32 for each element of this rank's part of a tensor.

    Args:
        full: Tensor with a shape and placements; its values and its type do not matter.
        key: Text that the random numbers depend on, besides the indices of the element.
        device: Device of the result.
    """
    first = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), signed=True)
    boxes = [
        (box, _box_bits(box.region, first, device=device)) for box in local_boxes(full.detach())
    ]
    if len(boxes) == 1:
        return boxes[0][1]
    sizes = [
        max(offset + length for offset, (_, length) in dim)
        for dim in zip(*(zip(b.offsets, b.region, strict=True) for b, _ in boxes), strict=True)
    ]
    bits = torch.empty(sizes, dtype=torch.int32, device=device)
    for box, part in boxes:
        box.view(bits).copy_(part)
    return bits


def _box_bits(region: tuple[tuple[int, int], ...], first: int, *, device: torch.device) -> Tensor:
    """Hash the indices of a box, one dimension after another, starting with a number."""
    bits = torch.full((), first, dtype=torch.int32, device=device)
    for start, length in region:
        indices = torch.arange(start, start + length, dtype=torch.int32, device=device)
        bits = _mix(bits.unsqueeze(-1) + indices)
    return bits


def _mix(bits: Tensor) -> Tensor:
    """Hash each int32 in place. Shifts are made logical by masks; products wrap around."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(_DROPPED))
