"""Operations between ranks, the same on gloo, NCCL and mock; a user's calls, not the hot path.

Where a backend lacks an operation or a dtype, it is composed from what it has. On gloo and mock
every rank first says what it is about to do, so that calls that don't fit are errors on all of
them; NCCL leaves that to ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. ``src`` and ``dst`` are global
ranks; ``group=None`` is the whole world; non-contiguous tensors are fine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm.argument_checks import (
    REDUCED_AS,
    device_of,
    divisibility_error,
    is_me,
    peer_error,
    reduce_op_error,
    tensor_error,
)
from axonlaunch.comm.backend import Backend, ReduceOp
from axonlaunch.comm.errors import say_tensor
from axonlaunch.comm.json_exchange import all_gather_json
from axonlaunch.comm.mismatch_check import check_collective, check_p2p
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
    """Say whether this is rank 0; True without a world."""
    return rank() == 0


def all_reduce(
    tensor: Tensor, *, op: ReduceOp = ReduceOp.Sum, group: ProcessGroup | None = None
) -> Tensor:
    """Combine the tensors of all ranks, in place on each, and return the tensor.

    The average of float16 and bfloat16 is summed in float32 (by NCCL itself on NCCL). Booleans
    have a maximum (any), a minimum and a product (all).

    Args:
        tensor: Of any shape, the same on every rank; it is overwritten.
        op: How elements are combined.
        group: The ranks, all of which call this; None: the world.

    Raises:
        TypeError: The operation has no meaning for the dtype, such as the mean of integers.
        ValueError: This rank is not in the group, or the tensor is on a device that it lacks.
        MismatchError: Ranks bring different shapes, dtypes or operations.
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
    """Sum over ranks, in place, and return the tensor; errors are those of ``all_reduce``."""
    return all_reduce(tensor, op=ReduceOp.Sum, group=group)


def all_reduce_mean(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Average over ranks, in place, and return the tensor; not of integers; see ``all_reduce``."""
    return all_reduce(tensor, op=ReduceOp.Average, group=group)


def all_reduce_min(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Take the smallest over ranks, elementwise, in place: of booleans, whether all are true."""
    return all_reduce(tensor, op=ReduceOp.Min, group=group)


def all_reduce_max(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Take the largest over ranks, elementwise, in place: of booleans, whether any is true."""
    return all_reduce(tensor, op=ReduceOp.Max, group=group)


def all_reduce_product(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Multiply over ranks, elementwise, in place, and return the tensor; see ``all_reduce``."""
    return all_reduce(tensor, op=ReduceOp.Product, group=group)


def broadcast(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Copy the tensor of the group's first rank to all, in place; as ``broadcast_from``."""
    group = group_or_default(group)
    return broadcast_from(tensor, src=group.ranks[0], group=group)


def broadcast_from(tensor: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Copy the tensor of rank ``src`` to all, in place, and return it; any dtype.

    Raises:
        ValueError: ``src`` or this rank is not in the group, or the device is not the group's.
        MismatchError: Ranks bring different shapes or dtypes, or name different sources.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group, written=True) or peer_error("src", src, group)
    _begin(f"broadcast from rank {src}", tensor, group, problem)
    buffer = _plain(tensor)
    if buffer.numel():
        dist.broadcast(_bytes(buffer), src, group=group.torch_group)
    return _from_buffer(buffer, tensor)


def all_gather(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensors of all ranks as a new one of shape ``[size, *shape]``, by rank.

    Raises:
        ValueError: This rank is not in the group, or the device is not the group's.
        MismatchError: Ranks bring different shapes or dtypes.
    """
    group = group_or_default(group)
    _begin("all_gather", tensor, group, tensor_error(tensor, group))
    result = tensor.new_empty((group.size, *tensor.shape), requires_grad=False)
    if result.numel():
        source = _bytes(_plain(tensor))
        all_gather_single(_bytes(result), source, group=group.torch_group)
    return result


def reduce_scatter_sum(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum over ranks and return this rank's part of dim 0: ``[size * n, ...]`` to ``[n, ...]``.

    Raises:
        TypeError: The sum has no meaning for the dtype.
        ValueError: Dim 0 is not divisible by the group's size, this rank is not in the group, or
            the device is not the group's.
        MismatchError: Ranks bring different shapes or dtypes.
    """
    return _reduce_scatter("reduce_scatter_sum", tensor, ReduceOp.Sum, group)


def reduce_scatter_mean(tensor: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Average over ranks; return this rank's part of dim 0, as ``reduce_scatter_sum``.

    Raises:
        TypeError: The dtype is an integer's or bool, whose mean is none.
    """
    return _reduce_scatter("reduce_scatter_mean", tensor, ReduceOp.Average, group)


def gather_tensor(
    tensor: Tensor, *, dst: int = 0, group: ProcessGroup | None = None
) -> Tensor | None:
    """Return the tensors of all ranks as ``[size, *shape]`` on rank ``dst``, None elsewhere.

    Raises:
        ValueError: ``dst`` or this rank is not in the group, or the device is not the group's.
        MismatchError: Ranks bring different shapes or dtypes, or name different destinations.
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
    """Divide dim 0 of rank ``src``'s tensor among the ranks: ``[size * n, ...]`` to ``[n, ...]``.

    Ranks other than ``src`` pass None; shape and dtype come from ``src``.

    Raises:
        TypeError: ``src`` brings no tensor.
        ValueError: Another rank brings one, dim 0 is not divisible by the group's size, ``src``
            or this rank is not in the group, or the device is not the group's.
        MismatchError: Ranks name different sources, or ``src`` has one of the problems above.
    """
    group = group_or_default(group)
    problem: Exception | None = peer_error("src", src, group)
    line = f"scatter_tensor from rank {src}"
    if problem is None and is_me(src, group):
        problem = tensor_error(tensor, group) or divisibility_error(tensor, group)
        if problem is None and tensor is not None:
            line += f"|{str(tensor.dtype)[6:]}|{','.join(map(str, tensor.shape))}"
    elif problem is None and tensor is not None:
        problem = ValueError(f"only rank {src} brings a tensor, rank {rank()} passes None")
    if problem is not None:
        problem = type(problem)(f"scatter_tensor: {problem}")
    lines = check_collective(group, line, problem=problem)
    _, dtype, shape = _said_by(src, line, lines, group).split("|")
    whole = [int(size) for size in shape.split(",")]
    part = [whole[0] // group.size, *whole[1:]]
    result = torch.empty(part, dtype=getattr(torch, dtype), device=device_of(group))
    if result.numel():
        inputs = None
        if tensor is not None:
            source = _plain(tensor)
            inputs = [_bytes(chunk) for chunk in source.unflatten(0, (group.size, -1))]
        dist.scatter(_bytes(result), inputs, src=src, group=group.torch_group)
    return result


def send(tensor: Tensor, *, dst: int, group: ProcessGroup | None = None) -> None:
    """Send a tensor to rank ``dst``, which calls ``recv``; returns when it has been taken.

    Raises:
        ValueError: ``dst`` is this rank or not in the group, this rank is not in the group, or
            the device is not the group's.
        MismatchError: The receiver's buffer has another shape or dtype.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group) or peer_error("dst", dst, group, other=True)
    _begin_message("send", tensor, dst, group, problem)
    if tensor.numel():
        dist.send(_bytes(_plain(tensor)), dst, group=group.torch_group)


def recv(tensor: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Receive from rank ``src``, which calls ``send``, into the tensor, and return it.

    Raises:
        ValueError: ``src`` is this rank or not in the group, this rank is not in the group, or
            the device is not the group's.
        MismatchError: What is sent has another shape or dtype.
    """
    group = group_or_default(group)
    problem = tensor_error(tensor, group, written=True) or peer_error("src", src, group, other=True)
    _begin_message("recv", tensor, src, group, problem)
    buffer = _plain(tensor)
    if buffer.numel():
        dist.recv(_bytes(buffer), src, group=group.torch_group)
    return _from_buffer(buffer, tensor)


def barrier(group: ProcessGroup | None = None) -> None:
    """Return when every rank of the group has called it."""
    group = group_or_default(group)
    check_collective(group, "barrier")
    if group.backend is Backend.NCCL:
        dist.barrier(group=group.torch_group, device_ids=[torch.accelerator.current_device_index()])


def group_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group meant, of which this rank must be a member; None is the world.

    Raises:
        TypeError: It is torch's group, or anything else.
        ValueError: This rank is not in it.
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
    """Let all ranks agree on a call on a tensor, or all raise."""
    if problem is not None:
        problem = type(problem)(f"{name}: {problem}")
        check_collective(group, name, problem=problem)
    check_collective(group, f"{name} of {say_tensor(tensor)}")


def _begin_message(
    verb: str, tensor: Tensor, peer: int, group: ProcessGroup, problem: Exception | None
) -> None:
    """Let both ends of a message agree, or both raise."""
    if problem is not None:
        problem = type(problem)(f"{verb}: {problem}")
    if group.contains(peer) and not is_me(peer, group):
        check_p2p(peer, group, verb, "" if problem else say_tensor(tensor), problem=problem)
    elif problem is not None:
        raise problem


def _plain(tensor: Tensor) -> Tensor:
    """Return the values, contiguous: the tensor's own memory where that is so already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, which every backend moves, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def reduce_values(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> Tensor:
    """All-reduce without any check; the result is in the tensor's own memory where that serves.

    That is where it is contiguous and of a dtype that the backend reduces.
    """
    buffer = _to_buffer(tensor, op, group)
    if buffer.numel() and group.size > 1:
        dist.all_reduce(_real(buffer), op=_torch_op(op, group), group=group.torch_group)
        if _is_composed(op, group):
            buffer.div_(group.size)
    return buffer


def _is_composed(op: ReduceOp, group: ProcessGroup) -> bool:
    """Say whether the average is a sum that is divided here: only NCCL has one of its own."""
    return op is ReduceOp.Average and group.backend is not Backend.NCCL


def _torch_op(op: ReduceOp, group: ProcessGroup) -> Any:
    return _TORCH_OP[ReduceOp.Sum if _is_composed(op, group) else op]


def _to_buffer(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> Tensor:
    """Return the values in a dtype that the backend can reduce."""
    dtype = REDUCED_AS[tensor.dtype]
    if _is_composed(op, group) and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # the sum of many could overflow, or lose what the mean keeps
    return _plain(tensor).to(dtype)


def _from_buffer(buffer: Tensor, tensor: Tensor) -> Tensor:
    """Write a buffer back into the tensor it was made from, unless it is the same memory."""
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


def _said_by(src: int, line: str, lines: list[str], group: ProcessGroup) -> str:
    """Return what rank ``src`` said; on NCCL nobody has heard it yet."""
    if group.backend is Backend.NCCL and group.size > 1:
        lines = all_gather_json(line, group=group.torch_group)
    return lines[group.ranks.index(src)]
