"""Differentiable collectives on plain tensors, for layers that exchange data within a group.

All functions except ``start_sum`` work out of place: they never write their input, and nothing else
refers to their result. Dimensions that the group's size does not divide are an error. Calls are not
compared between ranks, because this is the hot path.

Source: Shoeybi et al., "Megatron-LM", 2019 (f and g); Korthikanti et al., "Reducing Activation
Recomputation", 2022 (their forms under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# torch_internals imports the fake kernels of the operations below.
from axonlaunch.comm import torch_internals  # noqa: F401
from axonlaunch.comm.process_group import ProcessGroup

# These raw operations are used instead of torch's functional collectives, which return a lazily
# waiting tensor subclass. Each use of that subclass takes longer than a small all-reduce. Selective
# checkpointing and torch.compile recognize these operations by name.
_all_reduce = torch.ops._c10d_functional.all_reduce.default
_all_reduce_in_place = torch.ops._c10d_functional.all_reduce_.default
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
_all_to_all = torch.ops._c10d_functional.all_to_all_single.default
_wait = torch.ops._c10d_functional.wait_tensor.default


_fusible: set[str] = set()


def make_fusible(group: ProcessGroup) -> None:
    """Use only the form of a group's exchanges that torch's compiler can fuse.

    If the parts of the ranks are already consecutive in memory, this form makes one more copy
    unless it is compiled.
    """
    _fusible.add(group.torch_group.group_name)


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity in forward, sum over ranks in backward. Begins a region of partial results.

    This is Megatron's f. ``x`` is [...], the same on every rank, and its gradient too.
    """
    if group.size == 1:
        return x
    result: Tensor = _copy(x, group.torch_group.group_name)
    return result


def all_reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks in forward, identity in backward. Ends a region of partial results.

    This is Megatron's g. ``x`` is [...], a different summand on each rank; the sum [...] is the
    same on every rank.
    """
    if group.size == 1:
        return x
    result: Tensor = _reduce(x, group.torch_group.group_name)
    return result


def all_gather_from_group(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather along ``dim`` in forward, reduce-scatter in backward. Begins a region.

    ``x`` is this rank's part [..., n, ...]; the result is the full tensor [..., size * n, ...], by
    rank.
    """
    if group.size == 1:
        return x
    result: Tensor = _gather_parts(x, *_exchange(x, group, dim))
    return result


def reduce_scatter_to(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter along ``dim`` in forward, all-gather in backward. Ends a region.

    ``x`` is this rank's summand of the full tensor [..., size * n, ...]; the result is its part of
    the sum [..., n, ...].

    Raises:
        ValueError: The group's size does not divide the dimension.
    """
    if group.size == 1:
        return x
    _refuse_indivisible(x, group, dim)
    result: Tensor = _scatter_parts(x, *_exchange(x, group, dim))
    return result


def scatter_to_group(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Take this rank's part along ``dim`` in forward, all-gather in backward.

    ``x`` is [..., size * n, ...], the same on every rank; the result is a part [..., n, ...].

    Raises:
        ValueError: The group's size does not divide the dimension.
    """
    if group.size == 1:
        return x
    _refuse_indivisible(x, group, dim)
    result: Tensor = _split(x, *_exchange(x, group, dim), group.rank)
    return result


def collect_from(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather along ``dim`` in forward, take this rank's part of the gradient in backward.

    This is for a full tensor that every rank uses in the same way: each rank has its full gradient,
    which is not summed. ``x`` is a part [..., n, ...]; the result is [..., size * n, ...].
    """
    if group.size == 1:
        return x
    result: Tensor = _collect(x, *_exchange(x, group, dim), group.rank)
    return result


def exchange_rows(
    x: Tensor, group: ProcessGroup, *, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Exchange rows with every rank in forward, and their gradients in backward.

    Args:
        x: Rows [sum(sent), ...], those for the first rank first.
        group: The ranks that exchange rows.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.

    Returns:
        Received rows [sum(received), ...], those from the first rank first.
    """
    if group.size == 1:
        return x
    name = group.torch_group.group_name
    result: Tensor = _exchange_rows(x, [*sent], [*received], name)
    return result


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [...] over ranks into new memory; not differentiable."""
    return x if group.size == 1 else _sum(x, group.torch_group.group_name)


def max_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Take the maximum of [...] over ranks into new memory; not differentiable."""
    if group.size == 1:
        return x
    return finish(_all_reduce(x, "max", group.torch_group.group_name))


def start_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to sum [...] over ranks in place; nothing else may use the tensor any more.

    The out-of-place operation would copy it first. The tensor must not be read or passed to any
    function except ``finish`` until ``finish`` has returned.
    """
    if group.size == 1:
        return x
    pending: Tensor = _all_reduce_in_place(x, "sum", group.torch_group.group_name)
    return pending


def start_reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Begin to sum [..., size * n, ...] over ranks, with parts [..., n, ...] along ``dim``.

    Returns:
        Memory of this rank's part, which may be read after ``finish``.
    """
    return x if group.size == 1 else _start_scatter_sum(x, *_exchange(x, group, dim))


def finish(pending: Tensor) -> Tensor:
    """Wait for the result of ``start_sum`` or ``start_reduce_scatter``, and return it.

    On a GPU, the current stream waits and the host does not.
    """
    result: Tensor = _wait(pending)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.name), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # noqa: ARG004
        return _sum(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str) -> Tensor:
        ctx.exchange = (dim, size, name)
        return _gather(x, dim, size, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _scatter_sum(gradient, *ctx.exchange), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str) -> Tensor:
        ctx.exchange = (dim, size, name)
        return _scatter_sum(x, dim, size, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gather(gradient, *ctx.exchange), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        ctx.exchange = (sent, received, name)
        return _send_rows(x, sent, received, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent, received, name = ctx.exchange
        return _send_rows(gradient, received, sent, name), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str, rank: int) -> Tensor:
        ctx.exchange = (dim, size, name)
        return _part(x, dim, size, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gather(gradient, *ctx.exchange), None, None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str, rank: int) -> Tensor:
        ctx.part = (dim, size, rank)
        return _gather(x, dim, size, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _part(gradient, *ctx.part), None, None, None, None


def _sum(x: Tensor, name: str) -> Tensor:
    return finish(_all_reduce(x, "sum", name))


def _gather(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    gathered = finish(_all_gather(x.contiguous(), size, name))
    if dim == 0:
        return gathered
    # The parts of the ranks are already consecutive.
    if x.shape[:dim].numel() == 1 and name not in _fusible:
        return gathered.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(gathered.chunk(size), dim)


def _scatter_sum(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    return finish(_start_scatter_sum(x, dim, size, name))


def _start_scatter_sum(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    if dim == 0:
        x = x.contiguous()
    elif x.shape[:dim].numel() == 1 and name not in _fusible:
        x = x.contiguous().view(-1, *x.shape[1:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    else:
        x = torch.cat(x.chunk(size, dim))
    pending: Tensor = _reduce_scatter(x, "sum", size, name)
    return pending


def _send_rows(x: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
    return finish(_all_to_all(x.contiguous(), received, sent, name))


def _part(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    # Copy, because a view would keep the full tensor alive until backward.
    length = x.shape[dim] // size
    return x.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)


def _exchange(x: Tensor, group: ProcessGroup, dim: int) -> tuple[int, int, str]:
    return dim % x.ndim, group.size, group.torch_group.group_name


def _refuse_indivisible(x: Tensor, group: ProcessGroup, dim: int) -> None:
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dim {dim} of a tensor {list(x.shape)} can't be split into {group.size} equal parts, "
            f"one per rank: make its {x.shape[dim]} a multiple of {group.size}"
        )


_copy: Any = _Copy.apply
_reduce: Any = _Reduce.apply
_gather_parts: Any = _Gather.apply
_scatter_parts: Any = _ReduceScatter.apply
_exchange_rows: Any = _ExchangeRows.apply
_split: Any = _Split.apply
_collect: Any = _Collect.apply
