"""Collectives that autograd passes through, on plain tensors: a layer's exchange with its group.

Each is out of place, but for ``start_sum``: it never writes its input, and nothing else holds its
result. What the size of a group does not divide is refused; agreement among ranks is not checked,
for this is the hot path.

Source: Shoeybi et al., "Megatron-LM", 2019 (f and g); Korthikanti et al., "Reducing Activation
Recomputation", 2022 (their forms under sequence parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# torch_internals imports what gives the operations below fake kernels.
from axonlaunch.comm import torch_internals  # noqa: F401
from axonlaunch.comm.process_group import ProcessGroup

# The raw operations rather than torch's functional collectives: those return a tensor subclass
# that waits lazily, whose every use costs more than a small all-reduce. Selective checkpointing
# and torch.compile know these by name.
_all_reduce = torch.ops._c10d_functional.all_reduce.default
_all_reduce_in_place = torch.ops._c10d_functional.all_reduce_.default
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
_wait = torch.ops._c10d_functional.wait_tensor.default


_fusible: set[str] = set()


def make_fusible(group: ProcessGroup) -> None:
    """Exchange parts of a group's tensors in the one form that torch's compiler knows.

    Where the ranks' parts lie one after the other already, that form copies them once more, but for
    the compiler.
    """
    _fusible.add(group.torch_group.group_name)


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a region where each rank computes a part: identity forward, sum backward.

    Megatron's f. ``x`` is [...], the same on every rank, and so is its gradient.
    """
    if group.size == 1:
        return x
    result: Tensor = _copy(x, group.torch_group.group_name)
    return result


def all_reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Leave such a region: sum over ranks forward, identity backward.

    Megatron's g. ``x`` is [...], each rank's summand; the sum [...] is the same on every rank.
    """
    if group.size == 1:
        return x
    result: Tensor = _reduce(x, group.torch_group.group_name)
    return result


def all_gather_from_group(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Enter such a region from parts along ``dim``: all-gather forward, reduce-scatter backward.

    ``x`` is a rank's part [..., n, ...]; the result is the whole [..., size * n, ...], by rank.
    """
    if group.size == 1:
        return x
    result: Tensor = _gather_parts(x, *_exchange(x, group, dim))
    return result


def reduce_scatter_to(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Leave such a region to parts along ``dim``: reduce-scatter forward, all-gather backward.

    ``x`` is a rank's summand of the whole [..., size * n, ...]; the result is its part of the sum
    [..., n, ...].

    Raises:
        ValueError: The group's size does not divide the dim.
    """
    if group.size == 1:
        return x
    _refuse_indivisible(x, group, dim)
    result: Tensor = _scatter_parts(x, *_exchange(x, group, dim))
    return result


def scatter_to_group(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Take this rank's equal part along ``dim`` forward; all-gather backward.

    ``x`` is [..., size * n, ...], the same on every rank; the result is a part [..., n, ...].

    Raises:
        ValueError: The group's size does not divide the dim.
    """
    if group.size == 1:
        return x
    _refuse_indivisible(x, group, dim)
    result: Tensor = _split(x, *_exchange(x, group, dim), group.rank)
    return result


def collect_from(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Join the ranks' parts along ``dim`` forward; this rank's part backward.

    For a whole that every rank then uses alike: its gradient is whole on each, and is not summed.
    ``x`` is a part [..., n, ...]; the result is [..., size * n, ...].
    """
    if group.size == 1:
        return x
    result: Tensor = _collect(x, *_exchange(x, group, dim), group.rank)
    return result


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [...] over ranks, to new memory; a step that autograd does not follow."""
    return x if group.size == 1 else _sum(x, group.torch_group.group_name)


def max_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Take the maximum of [...] over ranks, to new memory; autograd does not follow it."""
    if group.size == 1:
        return x
    return finish(_all_reduce(x, "max", group.torch_group.group_name))


def start_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to sum [...] over ranks in its own memory, which nobody else may need any more.

    Out of place torch would first copy it. It may be read, or given to anything but ``finish``,
    only once ``finish`` has returned.
    """
    if group.size == 1:
        return x
    begun: Tensor = _all_reduce_in_place(x, "sum", group.torch_group.group_name)
    return begun


def start_reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Begin to sum [..., size * n, ...] over ranks to parts [..., n, ...] along ``dim``.

    Returns:
        The part's memory, readable after ``finish``.
    """
    return x if group.size == 1 else _start_scatter_sum(x, *_exchange(x, group, dim))


def finish(begun: Tensor) -> Tensor:
    """Wait for what ``start_sum`` or ``start_reduce_scatter`` began, and return it.

    On a GPU the current stream waits, and not the host.
    """
    done: Tensor = _wait(begun)
    return done


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
    whole = finish(_all_gather(x.contiguous(), size, name))
    if dim == 0:
        return whole
    # The ranks' parts lie one after the other already.
    if x.shape[:dim].numel() == 1 and name not in _fusible:
        return whole.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(whole.chunk(size), dim)


def _scatter_sum(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    return finish(_start_scatter_sum(x, dim, size, name))


def _start_scatter_sum(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    if dim == 0:
        x = x.contiguous()
    elif x.shape[:dim].numel() == 1 and name not in _fusible:
        x = x.contiguous().view(-1, *x.shape[1:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    else:
        x = torch.cat(x.chunk(size, dim))
    begun: Tensor = _reduce_scatter(x, "sum", size, name)
    return begun


def _part(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    # A copy: a view would keep the whole alive until backward.
    length = x.shape[dim] // size
    return x.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)


def _exchange(x: Tensor, group: ProcessGroup, dim: int) -> tuple[int, int, str]:
    return dim % x.ndim, group.size, group.torch_group.group_name


def _refuse_indivisible(x: Tensor, group: ProcessGroup, dim: int) -> None:
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dim {dim} of a tensor {list(x.shape)} can't be cut into {group.size} equal parts, "
            f"one per rank: make its {x.shape[dim]} a multiple of {group.size}"
        )


_copy: Any = _Copy.apply
_reduce: Any = _Reduce.apply
_gather_parts: Any = _Gather.apply
_scatter_parts: Any = _ReduceScatter.apply
_split: Any = _Split.apply
_collect: Any = _Collect.apply
