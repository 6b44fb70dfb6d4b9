"""Tensors of any shape and type passed between ranks: shape and type are sent before the tensor is.

For evaluation and prediction, whose shapes change; a training step's shapes are known.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.argument_checks import device_of

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
_MOST_DIMS = 8


def send_tensor(tensor: Tensor, peer: int, group: ProcessGroup) -> None:
    """Send a tensor to a global rank of the group."""
    dist.send(_describe(tensor), peer, group=group.torch_group)
    dist.send(tensor.contiguous(), peer, group=group.torch_group)


def receive_tensor(peer: int, group: ProcessGroup) -> Tensor:
    """Return the tensor that a global rank of the group sends."""
    about = torch.empty(_MOST_DIMS + 2, dtype=torch.int64)
    dist.recv(about, peer, group=group.torch_group)
    tensor = _like(about, group)
    dist.recv(tensor, peer, group=group.torch_group)
    return tensor


def broadcast_tensor(tensor: Tensor | None, source: int, group: ProcessGroup) -> Tensor:
    """Give every rank of the group the tensor of one, a global rank."""
    about = torch.empty(_MOST_DIMS + 2, dtype=torch.int64)
    if tensor is not None:
        about = _describe(tensor)
    dist.broadcast(about, source, group=group.torch_group)
    shared = _like(about, group) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, source, group=group.torch_group)
    return shared


def _describe(tensor: Tensor) -> Tensor:
    about = torch.zeros(_MOST_DIMS + 2, dtype=torch.int64)
    about[0], about[1] = _DTYPES.index(tensor.dtype), tensor.ndim
    about[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
    return about


def _like(about: Tensor, group: ProcessGroup) -> Tensor:
    dtype, ndim, *shape = about.tolist()
    return torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device_of(group))
