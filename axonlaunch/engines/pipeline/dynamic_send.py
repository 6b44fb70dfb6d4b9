"""Sends tensors of any shape and type between ranks; shape and type are sent before the data.

Used for evaluation and prediction, where shapes vary. In training steps the shapes are known.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.checks.argument_checks import device_of

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
_MAX_DIMS = 8


def send_tensor(tensor: Tensor, peer: int, group: ProcessGroup, *, is_known: bool = False) -> None:
    """Send a tensor to a rank of the group, given by its global rank.

    Args:
        peer: Global rank of the receiver.
        is_known: Whether the receiver knows shape and type.
    """
    if not is_known:
        dist.send(_header(tensor), peer, group=group.torch_group)
    dist.send(tensor.contiguous(), peer, group=group.torch_group)


def receive_tensor(peer: int, group: ProcessGroup, *, like: Tensor | None = None) -> Tensor:
    """Receive a tensor from a rank of the group, given by its global rank.

    Args:
        peer: Global rank of the sender.
        like: Tensor of the shape and type; None receives them first.
    """
    if like is not None:
        received = torch.empty(like.shape, dtype=like.dtype, device=device_of(group))
        dist.recv(received, peer, group=group.torch_group)
        return received
    header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64)
    dist.recv(header, peer, group=group.torch_group)
    tensor = _empty_for(header, group)
    dist.recv(tensor, peer, group=group.torch_group)
    return tensor


def broadcast_tensor(tensor: Tensor | None, source: int, group: ProcessGroup) -> Tensor:
    """Return the tensor of the global rank ``source`` on every rank of the group."""
    header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64)
    if tensor is not None:
        header = _header(tensor)
    dist.broadcast(header, source, group=group.torch_group)
    shared = _empty_for(header, group) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, source, group=group.torch_group)
    return shared


def _header(tensor: Tensor) -> Tensor:
    header = torch.zeros(_MAX_DIMS + 2, dtype=torch.int64)
    header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.ndim
    header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
    return header


def _empty_for(header: Tensor, group: ProcessGroup) -> Tensor:
    dtype, ndim, *shape = header.tolist()
    return torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device_of(group))
