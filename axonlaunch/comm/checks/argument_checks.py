"""Checks of a call's arguments that need only one rank.

Each check returns the problem instead of raising it, so that the other ranks can be informed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axonlaunch.comm.backend import Backend, ReduceOp
from axonlaunch.comm.process_group import ProcessGroup, computing_device

REDUCED_AS = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
    torch.int8: torch.int8,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.uint8: torch.uint8,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
}
"""Dtypes that can be reduced, with the dtype in which they are reduced on every backend."""


def is_me(global_rank: int, group: ProcessGroup) -> bool:
    """Return whether this rank, a member of the group, has the given global rank."""
    return group.ranks[group.rank] == global_rank


def device_of(group: ProcessGroup) -> torch.device:
    """Return the device of this group's tensors."""
    accelerator = torch.accelerator.current_accelerator()
    if group.backend is Backend.NCCL and accelerator is not None:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu") if group.backend is Backend.NCCL else computing_device()


def tensor_error(
    tensor: object, group: ProcessGroup, *, written: bool = False
) -> TypeError | ValueError | None:
    """Return the reason why a tensor can't be used with this group's backend.

    Args:
        tensor: The user's argument.
        group: Group that communicates the tensor.
        written: Whether the call writes to the tensor.

    Returns:
        The error to raise on every rank, or None. It is a TypeError if the argument is not a dense
        tensor, and a ValueError for a wrong device or if an expanded tensor would be written.
    """
    if not isinstance(tensor, Tensor):
        return TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "to_local"):
        return TypeError("this is a DTensor, which is split over ranks: pass tensor.to_local()")
    if tensor.layout is not torch.strided:
        return TypeError(f"the layout {tensor.layout} can't be sent: pass tensor.to_dense()")
    expected = device_of(group).type
    works_on = {expected} if group.backend is Backend.NCCL else {expected, "cpu"}
    if tensor.device.type not in works_on:
        return ValueError(
            f"the tensor is on {tensor.device}, but the group's backend {group.backend} works on "
            f"{expected}: move it with tensor.to(world.device)"
        )
    if written and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return ValueError("the tensor is expanded, so its elements share memory: clone it first")
    return None


def reduce_op_error(tensor: Tensor, op: ReduceOp) -> TypeError | None:
    """Return the reason why an operation is undefined for a tensor's dtype.

    Returns:
        The TypeError to raise, which names the dtype to convert to, or None.
    """
    dtype = str(tensor.dtype)[6:]
    if tensor.dtype not in REDUCED_AS:
        return TypeError(f"{dtype} can't be reduced: convert it with .to(torch.float32) first")
    if tensor.dtype is torch.bool and op in (ReduceOp.Sum, ReduceOp.Average):
        return TypeError(
            "a sum of bool is not a bool: count with .to(torch.int64), or use all_reduce_max (any) "
            "or all_reduce_min (all)"
        )
    if op is ReduceOp.Average and not (tensor.is_floating_point() or tensor.is_complex()):
        return TypeError(
            f"a mean of {dtype} is not a {dtype}: convert it with .to(torch.float32) first, or use "
            "the sum"
        )
    if tensor.is_complex() and op not in (ReduceOp.Sum, ReduceOp.Average):
        return TypeError(f"{dtype} supports only sum and mean between ranks, not {op.value}")
    return None


def peer_error(
    key: str, peer: int, group: ProcessGroup, *, other: bool = False
) -> ValueError | None:
    """Return the reason why a rank can't be the source or the destination.

    Args:
        key: Name of the argument, ``src`` or ``dst``.
        peer: Value of the argument, a global rank.
        group: Group that must contain the rank.
        other: Whether the rank must not be this rank.

    Returns:
        The ValueError to raise, or None.
    """
    if not group.contains(peer):
        return ValueError(f"{key}={peer} is not in the group {list(group.ranks)} (global ranks)")
    if other and is_me(peer, group):
        return ValueError(f"{key}={peer} is this rank itself: copy the tensor instead")
    return None


def divisibility_error(tensor: Tensor | None, group: ProcessGroup) -> ValueError | None:
    """Return the reason why dimension 0 can't be divided evenly among the ranks of a group.

    Returns:
        The ValueError to raise, or None.
    """
    assert tensor is not None
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        return ValueError(
            f"dim 0 of the shape {list(tensor.shape)} can't be sharded over {group.size} ranks: "
            "pad it to a multiple"
        )
    return None
