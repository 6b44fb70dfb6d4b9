"""Casts the inputs of custom operations as autocast casts those of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of one device in the type of autocast there, or unchanged without it."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)
