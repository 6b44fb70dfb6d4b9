"""What must hold on every backend: run by the threads of a mock world and by gloo processes.

``CHECKS`` maps a name to a function of the world, which asserts on every rank. Run as a script
it is one rank of a gloo world, which does all checks in order and writes down how they went.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch import comm
from axonlaunch.comm import MismatchError, ProcessGroup, ReduceOp, World
from axonlaunch.comm.row_bucket import RowBucket

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
    """The whole world, and a part of it with a hole, where this rank is in it."""
    if world not in _subgroups:
        _subgroups[world] = world.new_group(SUBGROUP)
    yield None
    if _subgroups[world].contains(world.rank):
        yield _subgroups[world]


def members(group: ProcessGroup | None) -> tuple[int, ...]:
    return tuple(range(WORLD_SIZE)) if group is None else group.ranks


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers: their sums and products are exact in every dtype."""
    counted = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    if dtype is torch.bool:
        return (counted + rank) % 3 > 0
    if dtype.is_complex:
        return torch.complex(counted % 3 + 1.0, counted % 2 + float(rank)).to(dtype)
    return (counted % 3 + 1 + rank).to(dtype)


def layouts(rank: int, dtype: torch.dtype, *, num_rows: int | None = None) -> Iterator[Tensor]:
    """The values in tensors of several shapes, contiguous and not; all with so many rows."""
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
    """What the members hold in the layout with this index, stacked."""
    return torch.stack(
        [list(layouts(rank, dtype, num_rows=rows))[index].detach() for rank in members(group)]
    )


def assert_same(seen: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(seen.detach(), expected, rtol=0, atol=0)


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


def reduces_in_place(world: World, op: ReduceOp, named: Callable[..., Tensor], dtype: Any) -> None:
    for group in groups(world):
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            call = named if index else partial(comm.all_reduce, op=op)
            assert call(tensor, group=group) is tensor
            assert_same(tensor, expected_of(op, of_all(group, index, dtype)))


@by_dtype(*FLOATS, *INTEGERS, torch.complex64)
def all_reduce_sum_adds(world: World, dtype: torch.dtype) -> None:
    reduces_in_place(world, ReduceOp.Sum, comm.all_reduce_sum, dtype)


@by_dtype(*FLOATS, torch.complex64)
def all_reduce_mean_averages(world: World, dtype: torch.dtype) -> None:
    reduces_in_place(world, ReduceOp.Average, comm.all_reduce_mean, dtype)


@by_dtype(*FLOATS, *INTEGERS, torch.bool)
def all_reduce_min_takes_the_smallest(world: World, dtype: torch.dtype) -> None:
    reduces_in_place(world, ReduceOp.Min, comm.all_reduce_min, dtype)


@by_dtype(*FLOATS, *INTEGERS, torch.bool)
def all_reduce_max_takes_the_largest(world: World, dtype: torch.dtype) -> None:
    reduces_in_place(world, ReduceOp.Max, comm.all_reduce_max, dtype)


@by_dtype(*FLOATS, *INTEGERS, torch.bool)
def all_reduce_product_multiplies(world: World, dtype: torch.dtype) -> None:
    reduces_in_place(world, ReduceOp.Product, comm.all_reduce_product, dtype)


@by_dtype(*INTEGERS, torch.bool)
def a_mean_of_integers_is_refused(world: World, dtype: torch.dtype) -> None:
    for call in (comm.all_reduce_mean, comm.reduce_scatter_mean):
        with pytest.raises(
            TypeError, match=r"mean: a (mean|sum) of .* is (no|not a) .*\.to\(torch\."
        ):
            call(values(world.rank, (WORLD_SIZE,), dtype))


@check
def a_mean_of_float16_does_not_overflow(world: World) -> None:
    tensor = torch.full((2,), 60000.0, dtype=torch.float16)
    assert comm.all_reduce_mean(tensor).tolist() == [60000.0] * 2


@by_dtype(*DTYPES)
def broadcast_copies_from_any_rank(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        tensor = next(layouts(world.rank, dtype))
        assert comm.broadcast(tensor, group=group) is tensor
        assert_same(tensor, of_all(group, 0, dtype)[0])
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            src = members(group)[index % len(members(group))]
            assert comm.broadcast_from(tensor, src=src, group=group) is tensor
            assert_same(tensor, of_all(group, index, dtype)[index % len(members(group))])


@by_dtype(*DTYPES)
def all_gather_stacks_by_rank(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            before = tensor.detach().clone()
            gathered = comm.all_gather(tensor, group=group)
            assert_same(gathered, of_all(group, index, dtype))
            assert_same(tensor, before)


@by_dtype(*DTYPES)
def gather_tensor_stacks_on_one_rank(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            dst = members(group)[index % len(members(group))]
            gathered = comm.gather_tensor(tensor, dst=dst, group=group)
            assert (gathered is None) == (world.rank != dst)
            if gathered is not None:
                assert_same(gathered, of_all(group, index, dtype))


@by_dtype(*DTYPES)
def scatter_tensor_divides_dim_0(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        size = len(members(group))
        position = members(group).index(world.rank)
        for index in range(4):
            src = members(group)[index % size]
            whole = list(layouts(src, dtype, num_rows=2 * size))[index]
            tensor = whole if world.rank == src else None
            part = comm.scatter_tensor(tensor, src=src, group=group)
            assert_same(part, whole[2 * position : 2 * position + 2])


@by_dtype(*FLOATS, *INTEGERS, torch.complex64)
def reduce_scatter_sum_divides_the_sum(world: World, dtype: torch.dtype) -> None:
    reduces_and_scatters(world, ReduceOp.Sum, comm.reduce_scatter_sum, dtype)


@by_dtype(*FLOATS)
def reduce_scatter_mean_divides_the_mean(world: World, dtype: torch.dtype) -> None:
    reduces_and_scatters(world, ReduceOp.Average, comm.reduce_scatter_mean, dtype)


ROWS = [torch.Size(shape) for shape in ((5, 2), (3,), (), (1, 4), (8, 3), (0, 2))]


@by_dtype(*FLOATS)
def a_bucket_of_rows_gives_each_rank_the_mean_of_its_own(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        ranks = members(group)
        bucket = RowBucket(ROWS, group=group or world.default_group)
        for step in range(2):  # a second step needs no other preparation
            bucket.start([values(world.rank + step, shape, dtype) for shape in ROWS])
            for shape, rows in zip(ROWS, bucket.finish(), strict=True):
                of_ranks = [values(rank + step, shape, dtype).double() for rank in ranks]
                mean = torch.stack(of_ranks).mean(0)
                parts = [*mean.chunk(len(ranks))] if mean.ndim else [mean] * len(ranks)
                own = ranks.index(world.rank)
                expected = parts[own] if own < len(parts) else mean[:0]
                torch.testing.assert_close(rows, expected.to(dtype))


def reduces_and_scatters(world: World, op: ReduceOp, call: Any, dtype: Any) -> None:
    for group in groups(world):
        size = len(members(group))
        position = members(group).index(world.rank)
        for index, tensor in enumerate(layouts(world.rank, dtype, num_rows=2 * size)):
            before = tensor.clone()
            part = call(tensor, group=group)
            whole = expected_of(op, of_all(group, index, dtype, rows=2 * size))
            assert_same(part, whole[2 * position : 2 * position + 2])
            assert_same(tensor, before)


@by_dtype(*DTYPES)
def send_reaches_recv_around_the_ring(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        ring = members(group)
        position = ring.index(world.rank)
        after, before = ring[(position + 1) % len(ring)], ring[position - 1]
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            buffer = torch.zeros_like(tensor.detach())
            if position == 0:
                comm.send(tensor, dst=after, group=group)
            assert comm.recv(buffer, src=before, group=group) is buffer
            if position != 0:
                comm.send(tensor, dst=after, group=group)
            assert_same(buffer, list(layouts(before, dtype))[index].detach())


@check
def barrier_returns_on_every_group(world: World) -> None:
    for group in groups(world):
        comm.barrier()
        comm.barrier(group)
        if group is not None:
            break
    else:
        comm.barrier()


@check
def the_world_says_who_is_who(world: World) -> None:
    assert (
        (comm.rank(), comm.world_size())
        == (world.rank, world.world_size)
        == (
            dist.get_rank(),
            WORLD_SIZE,
        )
    )
    assert comm.is_main_process() == world.is_main == (world.rank == 0)
    assert world.device == torch.device("cpu")
    assert world.default_group.ranks == tuple(range(WORLD_SIZE))
    assert world.default_group.torch_group is dist.group.WORLD
    group = world.new_group([2, 1])
    assert group.ranks == (1, 2)
    assert group.size == 2
    assert [group.contains(rank) for rank in range(4)] == [False, True, True, False]
    assert group.rank == [-1, 0, 1][world.rank]
    if world.rank == 0:
        with pytest.raises(ValueError, match=r"rank 0 is not in the group \[1, 2\]"):
            comm.barrier(group)
    else:
        wrapped = ProcessGroup.from_torch(group.torch_group)
        assert (wrapped.ranks, wrapped.rank) == (group.ranks, group.rank)
        assert wrapped.backend is world.backend


@check
def sync_gradients_averages_also_what_one_rank_lacks(world: World) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("all", "some", "none")})
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    used = ["all", "some"] if world.rank == 1 else ["all"]
    inputs = torch.full((1, 3), float(world.rank))
    torch.stack([model[name](inputs).sum() for name in used]).sum().backward()
    comm.sync_gradients([*model.parameters(), frozen])
    mean = sum(range(WORLD_SIZE)) / WORLD_SIZE
    assert_same(model["all"].weight.grad, torch.full((2, 3), mean))
    assert_same(model["all"].bias.grad, torch.full((2,), 1.0))
    assert_same(model["some"].weight.grad, torch.full((2, 3), 1.0) / WORLD_SIZE)
    assert model["none"].weight.grad is None
    assert frozen.grad is None
    comm.sync_gradients(model)
    assert_same(model["all"].bias.grad, torch.full((2,), 1.0))


@check
def sync_gradient_averages_one(world: World) -> None:
    for group in groups(world):
        parameter = nn.Parameter(torch.ones(2, 3).t())
        parameter.grad = torch.full((2, 3), float(world.rank)).t()
        comm.sync_gradient(parameter, group=group)
        mean = sum(members(group)) / len(members(group))
        assert_same(parameter.grad, torch.full((3, 2), mean))
    nobody = nn.Parameter(torch.ones(2))
    comm.sync_gradient(nobody)
    assert nobody.grad is None


@by_dtype(torch.bfloat16, torch.float64)
def sync_gradients_keeps_the_dtype(world: World, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(world.rank))
    comm.sync_gradients(model)
    assert_same(model.weight.grad, torch.ones(2, 2, dtype=dtype))


# Calls that don't fit: an error on every rank, and the world goes on.


@check
def shapes_that_differ_are_an_error_everywhere(world: World) -> None:
    odd = torch.zeros(3 if world.rank == 1 else 4)
    for call in (
        comm.all_reduce_sum,
        comm.all_reduce_mean,
        comm.broadcast,
        comm.all_gather,
        comm.gather_tensor,
    ):
        with pytest.raises(
            MismatchError, match=r"ranks 0, 2: \w+.* of float32 \[4\]; rank 1: .* \[3\]"
        ):
            call(odd)
    with pytest.raises(MismatchError, match=r"float32 \[3, 2\]; rank 1: .* \[3, 1\]"):
        comm.reduce_scatter_sum(torch.zeros(3, 1 if world.rank == 1 else 2))
    comm.barrier()


@check
def dtypes_that_differ_are_an_error_everywhere(world: World) -> None:
    odd = torch.zeros(4, dtype=torch.float64 if world.rank == 2 else torch.float32)
    with pytest.raises(MismatchError, match=r"ranks 0, 1: .* float32 \[4\]; rank 2: .* float64"):
        comm.all_reduce_max(odd)
    comm.barrier()


@check
def operations_that_differ_are_an_error_everywhere(world: World) -> None:
    call = comm.all_reduce_sum if world.rank else comm.all_gather
    with pytest.raises(MismatchError, match=r"rank 0: all_gather of .*; ranks 1, 2: all_reduce_s"):
        call(torch.zeros(4))
    call = comm.all_reduce_sum if world.rank else comm.all_reduce_max
    with pytest.raises(MismatchError, match="make the same calls in the same order"):
        call(torch.zeros(4))
    with pytest.raises(MismatchError, match="rank 2: barrier"):
        comm.barrier() if world.rank == 2 else comm.all_gather(torch.zeros(4))


@check
def sources_that_differ_are_an_error_everywhere(world: World) -> None:
    with pytest.raises(MismatchError, match=r"broadcast from rank 0 .*broadcast from rank 1"):
        comm.broadcast_from(torch.zeros(2), src=1 if world.rank == 2 else 0)
    with pytest.raises(MismatchError, match="gather_tensor to rank 2"):
        comm.gather_tensor(torch.zeros(2), dst=world.rank)
    with pytest.raises(MismatchError, match="scatter_tensor from rank 1"):
        comm.scatter_tensor(None if world.rank == 2 else torch.zeros(3), src=min(world.rank, 1))


@check
def a_problem_of_one_rank_is_told_to_all(world: World) -> None:
    mine, theirs = (TypeError, "a mean of int64"), (MismatchError, "rank 1 refused its call: ")
    kind, text = mine if world.rank == 1 else theirs
    with pytest.raises(kind, match=text):
        comm.all_reduce_mean(torch.zeros(2, dtype=torch.int64 if world.rank == 1 else None))
    kind = ValueError if world.rank == 0 else MismatchError
    with pytest.raises(kind, match=r"dim 0 of the shape \[4\] can't be divided among 3 ranks"):
        comm.scatter_tensor(torch.zeros(4) if world.rank == 0 else None)
    kind = ValueError if world.rank == 2 else MismatchError
    with pytest.raises(kind, match="only rank 0 brings a tensor, rank 2 passes None"):
        comm.scatter_tensor(torch.zeros(3) if world.rank != 1 else None)
    with pytest.raises((TypeError, MismatchError), match="expected a tensor, got NoneType"):
        comm.scatter_tensor(None)
    kind = TypeError if world.rank == 0 else MismatchError
    with pytest.raises(kind, match=r"pass tensor.to_dense\(\)"):
        comm.broadcast(torch.eye(2).to_sparse() if world.rank == 0 else torch.eye(2))
    comm.barrier()


@check
def messages_that_do_not_fit_are_an_error_at_both_ends(world: World) -> None:
    if world.rank == 0:
        with pytest.raises(MismatchError, match=r"0 calls send with float32 \[3\], but rank 1"):
            comm.send(torch.zeros(3), dst=1)
        with pytest.raises(MismatchError, match="ranks 0 and 1 both send"):
            comm.send(torch.zeros(3), dst=1)
        with pytest.raises(ValueError, match="send: the tensor is on meta"):
            comm.send(torch.zeros(3, device="meta"), dst=1)
    elif world.rank == 1:
        with pytest.raises(MismatchError, match=r"rank 0 calls send with float32 \[3\]: give"):
            comm.recv(torch.zeros(3, dtype=torch.float64), src=0)
        with pytest.raises(MismatchError, match="ranks 1 and 0 both send"):
            comm.send(torch.zeros(3), dst=0)
        with pytest.raises(MismatchError, match="rank 0 refused its call: send: the tensor is on"):
            comm.recv(torch.zeros(3), src=0)
    comm.barrier()


@check
def arguments_that_make_no_sense_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"src=7 is not in the group \[0, 1, 2\]"):
        comm.broadcast_from(torch.zeros(2), src=7)
    with pytest.raises(ValueError, match="dst=-1 is not in the group"):
        comm.gather_tensor(torch.zeros(2), dst=-1)
    with pytest.raises(ValueError, match=f"dst={world.rank} is this rank itself"):
        comm.send(torch.zeros(2), dst=world.rank)
    with pytest.raises(ValueError, match="src=3 is not in the group"):
        comm.recv(torch.zeros(2), src=3)
    with pytest.raises(ValueError, match=r"dim 0 of the shape \[4, 2\] can't be divided among 3"):
        comm.reduce_scatter_sum(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"dim 0 of the shape \[\] can't be divided"):
        comm.reduce_scatter_mean(torch.zeros(()))
    with pytest.raises(TypeError, match="all_reduce_sum: a sum of bool is not a bool: count with"):
        comm.all_reduce_sum(torch.zeros(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="complex64 has only a sum and a mean"):
        comm.all_reduce_max(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="float8_e4m3fn can't be reduced: convert"):
        comm.all_reduce_sum(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        comm.all_gather([1.0])
    with pytest.raises(ValueError, match=r"is on meta, the group's backend .* works on cpu"):
        comm.all_reduce_sum(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="the tensor is expanded"):
        comm.all_reduce_sum(torch.zeros(1).expand(4))
    with pytest.raises(TypeError, match=r"ProcessGroup.from_torch\(group\)"):
        comm.barrier(dist.group.WORLD)
    comm.barrier()


@check
def groups_that_make_no_sense_are_refused(world: World) -> None:
    for ranks, text in (
        ([], "at least one rank"),
        ([0, 3], "the world has ranks 0 to 2"),
        ([-1], "the world has ranks 0 to 2"),
        ([1, 1], "a rank can be in a group once"),
    ):
        with pytest.raises(ValueError, match=text):
            world.new_group(ranks)
    with pytest.raises(MismatchError, match=r"new_group of ranks \[0, 1\].* of ranks \[0, 2\]"):
        world.new_group([0, 2] if world.rank == 2 else [0, 1])
    comm.barrier()


@check
def gradients_that_differ_are_an_error_everywhere(world: World) -> None:
    with pytest.raises(MismatchError, match="sync_gradients of 2 parameters with"):
        comm.sync_gradients(nn.Linear(2, 3 if world.rank == 1 else 4))
    kind = TypeError if world.rank == 0 else MismatchError
    model = nn.Embedding(4, 2, sparse=world.rank == 0)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(kind, match=r"parameter 0 \(float32 \[4, 2\]\): .*to_dense"):
        comm.sync_gradients(model)
    comm.barrier()


# Values to compare between backends.


@check
def random_values(world: World) -> list[Any]:
    generator = torch.Generator().manual_seed(world.rank)
    results: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(257, generator=generator).to(dtype)
        results += [
            call(tensor.clone()).tolist()
            for call in (comm.all_reduce_sum, comm.all_reduce_mean, comm.all_reduce_product)
        ]
        results.append(comm.reduce_scatter_sum(tensor[:255]).tolist())
        results.append(comm.all_gather(tensor).tolist())
    return results


def main(folder: str) -> None:
    """Be one rank of a gloo world; the store is a file, so that no port is needed."""
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    outcomes: dict[str, Any] = {}
    with World.init(backend="gloo", timeout_s=30, store=store) as world:
        for name, function in CHECKS.items():
            try:
                outcomes[name] = {"value": function(world)}
            except Exception:
                outcomes[name] = {"error": traceback.format_exc()}
        rank = world.rank
    left = {"interface": os.environ.get("GLOO_SOCKET_IFNAME"), "world": dist.is_initialized()}
    Path(folder, f"{rank}.json").write_text(json.dumps({"checks": outcomes, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1])
