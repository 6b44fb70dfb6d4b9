"""Inputs for checks of collectives: names, values in every memory layout, expected results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonlaunch.comm import ProcessGroup, ReduceOp, World

WORLD_SIZE = 3
SUBGROUP = (0, 2)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OTHERS = (torch.bool, torch.complex64)
DTYPES = FLOATS + INTEGERS + OTHERS

CHECKS: dict[str, Callable[[World], Any]] = {}
_subgroups: weakref.WeakKeyDictionary[World, ProcessGroup] = weakref.WeakKeyDictionary()


def check(function: Callable[[World], Any]) -> Callable[[World], Any]:
    CHECKS[function.__name__] = function
    return function


def by_dtype(*dtypes: torch.dtype) -> Callable[[Any], Any]:
    def add(function: Callable[[World, torch.dtype], Any]) -> Callable[..., Any]:
        for dtype in dtypes:
            CHECKS[f"{function.__name__}-{str(dtype)[6:]}"] = partial(function, dtype=dtype)
        return function

    return add


def groups(world: World) -> Iterator[ProcessGroup | None]:
    """Yield the world's group, and a non-contiguous subgroup if this rank is in it."""
    if world not in _subgroups:
        _subgroups[world] = world.new_group(SUBGROUP)
    yield None
    if _subgroups[world].contains(world.rank):
        yield _subgroups[world]


def members(group: ProcessGroup | None) -> tuple[int, ...]:
    return tuple(range(WORLD_SIZE)) if group is None else group.ranks


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small integers, whose sums and products are exact in every dtype."""
    counted = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    if dtype is torch.bool:
        return (counted + rank) % 3 > 0
    if dtype.is_complex:
        return torch.complex(counted % 3 + 1.0, counted % 2 + float(rank)).to(dtype)
    return (counted % 3 + 1 + rank).to(dtype)


def layouts(rank: int, dtype: torch.dtype, *, num_rows: int | None = None) -> Iterator[Tensor]:
    """Yield the values as tensors of several shapes, contiguous and not, each with ``num_rows``
    rows.
    """
    rows = num_rows or 4
    yield values(rank, (rows, 3), dtype)
    yield values(rank, (3, rows), dtype).t()
    wide = torch.zeros(rows, 6, dtype=dtype)
    wide[:, ::2] = values(rank, (rows, 3), dtype)
    yield wide[:, ::2]
    yield values(rank, (rows, 0), dtype)
    if num_rows is None:
        yield values(rank, (), dtype)
        yield values(rank, (2, 1, 3), dtype).requires_grad_(dtype.is_floating_point)


def of_all(
    group: ProcessGroup | None, index: int, dtype: torch.dtype, rows: int | None = None
) -> Tensor:
    """Stack the values that the group's members have in the layout with this index."""
    return torch.stack(
        [list(layouts(rank, dtype, num_rows=rows))[index].detach() for rank in members(group)]
    )


def assert_same(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.detach(), expected, rtol=0, atol=0)


def expected_of(op: ReduceOp, stacked: Tensor) -> Tensor:
    dtype = stacked.dtype
    if dtype is torch.bool:
        stacked = stacked.to(torch.uint8)
    elif not dtype.is_complex:
        stacked = stacked.to(torch.float64)
    if not stacked.numel():
        return stacked.sum(0).to(dtype)
    reduced = {
        ReduceOp.Sum: lambda: stacked.sum(0),
        ReduceOp.Product: lambda: stacked.prod(0),
        ReduceOp.Min: lambda: stacked.amin(0),
        ReduceOp.Max: lambda: stacked.amax(0),
        ReduceOp.Average: lambda: stacked.sum(0) / stacked.shape[0],
    }[op]()
    return reduced.to(dtype)
