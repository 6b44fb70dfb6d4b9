"""User-facing collectives that behave the same on gloo, NCCL and the mock world.

Operations or dtypes that a backend lacks are composed from supported ones. On gloo and mock, ranks
first compare their calls, so that mismatched calls are errors on all ranks. On NCCL, use
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` for such checks. ``src`` and ``dst`` are global ranks.
``group=None`` is the whole world. Tensors may be non-contiguous. The engines' hot path does not use
these functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm.backend import Backend, ReduceOp
from axonlaunch.comm.checks.argument_checks import (
    REDUCED_AS,
    device_of,
    divisibility_error,
    is_me,
    peer_error,
    reduce_op_error,
    tensor_error,
)
from axonlaunch.comm.checks.json_exchange import all_gather_json
from axonlaunch.comm.checks.mismatch_check import check_collective, check_p2p
from axonlaunch.comm.errors import format_tensor
from axonlaunch.comm.process_group import ProcessGroup, default_group
from axonlaunch.comm.torch_internals import all_gather_single, reduce_scatter_single

_TORCH_OP = {
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Average: dist.ReduceOp.AVG,
}


def rank() -> int:
    """Return this process's rank; 0 without a world."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a world."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    """Return whether this is rank 0; True without a world."""
    return rank() == 0


def all_reduce(
    tensor: Tensor, *, op: ReduceOp = ReduceOp.Sum, group: ProcessGroup | None = None
) -> Tensor:
    """Combine the tensors of all ranks in place on each rank, and return the tensor.

    Averages of float16 and bfloat16 are summed in float32 (by NCCL itself on NCCL). Booleans
    support maximum (any), minimum and product (all).

    Args:
        tensor: Tensor of the same shape on every rank; it is overwritten.
        group: Group of ranks that all call this; None is the world.

    Raises:
        TypeError: The operation is undefined for the dtype, such as the mean of integers.
        ValueError: This rank is not in the group, or the tensor is on a device that the group does
            not support.
        MismatchError: Shapes, dtypes or operations differ between ranks.
    """
    group = group_or_default(group)
    name = f"all_reduce_{op.value.replace('average', 'mean')}"
    _begin(
        name,
        tensor,
        group,
        tensor_error(tensor, group, written=True) or reduce_op_error(tensor, op),
    )
    return _from_buffer(reduce_values(tensor, op, group), tensor)


def all_reduce_sum(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum over ranks in place and return the tensor; raises the errors of ``all_reduce``."""
    return all_reduce(tensor, op=ReduceOp.Sum, group=group)


def all_reduce_mean(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Average over ranks in place and return the tensor; not for integers; see ``all_reduce``."""
    return all_reduce(tensor, op=ReduceOp.Average, group=group)


def all_reduce_min(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Take the elementwise minimum over ranks in place; for booleans, whether all are true."""
    return all_reduce(tensor, op=ReduceOp.Min, group=group)


def all_reduce_max(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Take the elementwise maximum over ranks in place; for booleans, whether any is true."""
    return all_reduce(tensor, op=ReduceOp.Max, group=group)


def all_reduce_product(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Multiply elementwise over ranks in place and return the tensor; see ``all_reduce``."""
    return all_reduce(tensor, op=ReduceOp.Product, group=group)


def broadcast(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Copy the tensor of the group's first rank to all ranks in place; see ``broadcast_from``."""
    group = group_or_default(group)
    return broadcast_from(tensor, src=group.ranks[0], group=group)


def broadcast_from(tensor: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Copy the tensor of rank ``src`` to all ranks in place and return it; for any dtype.

    Raises:
        ValueError: ``src`` or this rank is not in the group, or the tensor is on a device that the
            group does not support.
        MismatchError: Shapes, dtypes or sources differ between ranks.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group, written=True) or peer_error("src", src, group)
    _begin(f"broadcast from rank {src}", tensor, group, problem)
    buffer = _plain(tensor)
    if buffer.numel():
        dist.broadcast(_bytes(buffer), src, group=group.torch_group)
    return _from_buffer(buffer, tensor)


def all_gather(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensors of all ranks as a new tensor of shape ``[size, *shape]``, by rank.

    Raises:
        ValueError: This rank is not in the group, or the tensor is on a device that the group does
            not support.
        MismatchError: Shapes or dtypes differ between ranks.
    """
    group = group_or_default(group)
    _begin("all_gather", tensor, group, tensor_error(tensor, group))
    result = tensor.new_empty((group.size, *tensor.shape), requires_grad=False)
    if result.numel():
        source = _bytes(_plain(tensor))
        all_gather_single(_bytes(result), source, group=group.torch_group)
    return result


def reduce_scatter_sum(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum over ranks and return this rank's part of dimension 0.

    ``tensor`` is [size * n, ...]; the result is [n, ...].

    Raises:
        TypeError: The sum is undefined for the dtype.
        ValueError: Dimension 0 is not divisible by the group's size, this rank is not in the group,
            or the tensor is on a device that the group does not support.
        MismatchError: Shapes or dtypes differ between ranks.
    """
    return _reduce_scatter("reduce_scatter_sum", tensor, ReduceOp.Sum, group)


def reduce_scatter_mean(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Average over ranks and return this rank's part of dimension 0; see ``reduce_scatter_sum``.

    Raises:
        TypeError: The dtype is integer or bool, for which the mean is undefined.
    """
    return _reduce_scatter("reduce_scatter_mean", tensor, ReduceOp.Average, group)


def gather_tensor(
    tensor: Tensor, *, dst: int = 0, group: ProcessGroup | None = None
) -> Tensor | None:
    """Return the tensors of all ranks as ``[size, *shape]`` on rank ``dst``, and None elsewhere.

    Raises:
        ValueError: ``dst`` or this rank is not in the group, or the tensor is on a device that the
            group does not support.
        MismatchError: Shapes, dtypes or destinations differ between ranks.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group) or peer_error("dst", dst, group)
    _begin(f"gather_tensor to rank {dst}", tensor, group, problem)
    result = None
    if is_me(dst, group):
        result = tensor.new_empty((group.size, *tensor.shape), requires_grad=False)
    if tensor.numel():
        outputs = None if result is None else [_bytes(part) for part in result]
        source = _bytes(_plain(tensor))
        dist.gather(source, outputs, dst=dst, group=group.torch_group)
    return result


def scatter_tensor(
    tensor: Tensor | None, *, src: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Divide dimension 0 of rank ``src``'s tensor among ranks: ``[size * n, ...]`` to ``[n, ...]``.

    Ranks other than ``src`` pass None; shape and dtype come from ``src``.

    Raises:
        TypeError: ``src`` passes no tensor.
        ValueError: Another rank passes a tensor, dimension 0 is not divisible by the group's size,
            ``src`` or this rank is not in the group, or the tensor is on a device that the group
            does not support.
        MismatchError: Sources differ between ranks, or ``src`` has one of the problems above.
    """
    group = group_or_default(group)
    problem: Exception | None = peer_error("src", src, group)
    line = f"scatter_tensor from rank {src}"
    if problem is None and is_me(src, group):
        problem = tensor_error(tensor, group) or divisibility_error(tensor, group)
        if problem is None and tensor is not None:
            line += f"|{str(tensor.dtype)[6:]}|{','.join(map(str, tensor.shape))}"
    elif problem is None and tensor is not None:
        problem = ValueError(f"only rank {src} passes a tensor, rank {rank()} must pass None")
    if problem is not None:
        problem = type(problem)(f"scatter_tensor: {problem}")
    lines = check_collective(group, line, problem=problem)
    _, dtype, shape = _line_of(src, line, lines, group).split("|")
    source_shape = [int(size) for size in shape.split(",")]
    part_shape = [source_shape[0] // group.size, *source_shape[1:]]
    result = torch.empty(part_shape, dtype=getattr(torch, dtype), device=device_of(group))
    if result.numel():
        inputs = None
        if tensor is not None:
            source = _plain(tensor)
            inputs = [_bytes(chunk) for chunk in source.unflatten(0, (group.size, -1))]
        dist.scatter(_bytes(result), inputs, src=src, group=group.torch_group)
    return result


def send(tensor: Tensor, *, dst: int, group: ProcessGroup | None = None) -> None:
    """Send a tensor to rank ``dst``, which must call ``recv``; returns after it was received.

    Raises:
        ValueError: ``dst`` is this rank or not in the group, this rank is not in the group, or the
            tensor is on a device that the group does not support.
        MismatchError: The receiver's buffer has another shape or dtype.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group) or peer_error("dst", dst, group, other=True)
    _begin_message("send", tensor, dst, group, problem)
    if tensor.numel():
        dist.send(_bytes(_plain(tensor)), dst, group=group.torch_group)


def recv(tensor: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Receive a tensor from rank ``src``, which must call ``send``, and return it.

    Raises:
        ValueError: ``src`` is this rank or not in the group, this rank is not in the group, or the
            tensor is on a device that the group does not support.
        MismatchError: The sent tensor has another shape or dtype.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group, written=True) or peer_error("src", src, group, other=True)
    _begin_message("recv", tensor, src, group, problem)
    buffer = _plain(tensor)
    if buffer.numel():
        dist.recv(_bytes(buffer), src, group=group.torch_group)
    return _from_buffer(buffer, tensor)


def barrier(group: ProcessGroup | None = None) -> None:
    """Return after every rank of the group has called this."""
    group = group_or_default(group)
    check_collective(group, "barrier")
    if group.backend is Backend.NCCL:
        dist.barrier(group=group.torch_group, device_ids=[torch.accelerator.current_device_index()])


def group_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group, which must contain this rank; None is the world.

    Raises:
        TypeError: ``group`` is not a ``ProcessGroup`` of this package.
        ValueError: This rank is not a member.
    """
    if group is None:
        return default_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group={group!r} is not an axonlaunch ProcessGroup: wrap a torch group with "
            "ProcessGroup.from_torch(group)"
        )
    _ = group.torch_group
    return group


def _begin(name: str, tensor: Tensor, group: ProcessGroup, problem: Exception | None) -> None:
    """Compare a call on a tensor with the other ranks; all ranks continue or all raise."""
    if problem is not None:
        problem = type(problem)(f"{name}: {problem}")
        check_collective(group, name, problem=problem)
    check_collective(group, f"{name} of {format_tensor(tensor)}")


def _begin_message(
    verb: str, tensor: Tensor, peer: int, group: ProcessGroup, problem: Exception | None
) -> None:
    """Compare both ends of a message; both ranks continue or both raise."""
    if problem is not None:
        problem = type(problem)(f"{verb}: {problem}")
    if group.contains(peer) and not is_me(peer, group):
        check_p2p(peer, group, verb, "" if problem else format_tensor(tensor), problem=problem)
    elif problem is not None:
        raise problem


def _plain(tensor: Tensor) -> Tensor:
    """Return the values as a contiguous tensor, without a copy if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, which every backend can transfer."""
    return tensor.view(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def reduce_values(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> Tensor:
    """All-reduce without checks and return the result.

    The reduction is in place if the tensor is contiguous and the backend supports its dtype.
    """
    buffer = _to_buffer(tensor, op, group)
    if buffer.numel() and group.size > 1:
        dist.all_reduce(_real(buffer), op=_torch_op(op, group), group=group.torch_group)
        if _is_composed(op, group):
            buffer.div_(group.size)
    return buffer


def _is_composed(op: ReduceOp, group: ProcessGroup) -> bool:
    """Return whether the average is a sum that is divided here; only NCCL has an average."""
    return op is ReduceOp.Average and group.backend is not Backend.NCCL


def _torch_op(op: ReduceOp, group: ProcessGroup) -> Any:
    return _TORCH_OP[ReduceOp.Sum if _is_composed(op, group) else op]


def _to_buffer(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> Tensor:
    """Return the values in a dtype that the backend can reduce."""
    dtype = REDUCED_AS[tensor.dtype]
    if _is_composed(op, group) and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # the sum of many could overflow or lose precision
    return _plain(tensor).to(dtype)


def _from_buffer(buffer: Tensor, tensor: Tensor) -> Tensor:
    """Copy a buffer back into its tensor, unless they share memory."""
    if buffer.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.detach().copy_(buffer)
    return tensor


def _reduce_scatter(name: str, tensor: Tensor, op: ReduceOp, group: ProcessGroup | None) -> Tensor:
    group = group_or_default(group)
    problem = (
        tensor_error(tensor, group)
        or reduce_op_error(tensor, op)
        or divisibility_error(tensor, group)
    )
    _begin(name, tensor, group, problem)
    buffer = _to_buffer(tensor, op, group)
    result = buffer.new_empty((buffer.shape[0] // group.size, *buffer.shape[1:]))
    if result.numel():
        reduce_scatter_single(
            _real(result), _real(buffer), op=_torch_op(op, group), group=group.torch_group
        )
        if _is_composed(op, group):
            result.div_(group.size)
    return result.to(tensor.dtype)


def _line_of(src: int, line: str, lines: list[str], group: ProcessGroup) -> str:
    """Return the call of rank ``src``; on NCCL it is exchanged here."""
    if group.backend is Backend.NCCL and group.size > 1:
        lines = all_gather_json(line, group=group.torch_group)
    return lines[group.ranks.index(src)]
