"""What one rank can say alone about a call: why its arguments won't do.

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
"""The dtypes that can be reduced, and what each is reduced as on every backend."""


def is_me(global_rank: int, group: ProcessGroup) -> bool:
    """Say whether this rank, a member of the group, has that global rank."""
    return group.ranks[group.rank] == global_rank


def device_of(group: ProcessGroup) -> torch.device:
    """Return where this group's tensors live."""
    accelerator = torch.accelerator.current_accelerator()
    if group.backend is Backend.NCCL and accelerator is not None:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu") if group.backend is Backend.NCCL else computing_device()


def tensor_error(
    tensor: object, group: ProcessGroup, *, written: bool = False
) -> TypeError | ValueError | None:
    """Say what keeps a tensor from this group's backend.

    Args:
        tensor: What a user passed.
        group: Whose backend moves it.
        written: Whether the call writes to it.

    Returns:
        The error to raise on every rank: a TypeError for what is no dense tensor, a ValueError
        for a wrong device or an expanded tensor that is written; None: nothing does.
    """
    if not isinstance(tensor, Tensor):
        return TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "to_local"):
        return TypeError("this is a DTensor, whose ranks hold parts: pass tensor.to_local()")
    if tensor.layout is not torch.strided:
        return TypeError(f"the layout {tensor.layout} can't be sent: pass tensor.to_dense()")
    expected = device_of(group).type
    works_on = {expected} if group.backend is Backend.NCCL else {expected, "cpu"}
    if tensor.device.type not in works_on:
        return ValueError(
            f"the tensor is on {tensor.device}, the group's backend {group.backend} works on "
            f"{expected}: move it with tensor.to(world.device)"
        )
    if written and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return ValueError("the tensor is expanded, its elements share memory: clone it first")
    return None


def reduce_op_error(tensor: Tensor, op: ReduceOp) -> TypeError | None:
    """Say why an operation has no meaning for a tensor's dtype.

    Returns:
        The TypeError to raise, with the dtype to convert to; None: it has one.
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
            f"a mean of {dtype} is no {dtype}: convert it with .to(torch.float32) first, or use "
            "the sum"
        )
    if tensor.is_complex() and op not in (ReduceOp.Sum, ReduceOp.Average):
        return TypeError(f"{dtype} has only a sum and a mean between ranks, no {op.value}")
    return None


def peer_error(
    key: str, peer: int, group: ProcessGroup, *, other: bool = False
) -> ValueError | None:
    """Say why a rank can't be the source or the destination.

    Args:
        key: The argument's name, ``src`` or ``dst``.
        peer: Its value, a global rank.
        group: The ranks that may be.
        other: Whether this rank itself may not.

    Returns:
        The ValueError to raise; None: it can.
    """
    if not group.contains(peer):
        return ValueError(f"{key}={peer} is not in the group {list(group.ranks)} (global ranks)")
    if other and is_me(peer, group):
        return ValueError(f"{key}={peer} is this rank itself: copy the tensor instead")
    return None


def divisibility_error(tensor: Tensor | None, group: ProcessGroup) -> ValueError | None:
    """Say why dim 0 of a tensor can't be divided evenly among the ranks of a group.

    Returns:
        The ValueError to raise; None: it can.
    """
    assert tensor is not None
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        return ValueError(
            f"dim 0 of the shape {list(tensor.shape)} can't be divided among {group.size} ranks: "
            "pad it to a multiple"
        )
    return None
