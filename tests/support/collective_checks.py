"""Checks of collectives that every backend must pass, on mock world threads and gloo processes.

``CHECKS`` maps a name to a function of the world, which asserts on every rank. Run as a script,
this file is one rank of a gloo world: it runs all checks in order and writes their results.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch import comm
from axonlaunch.comm import ProcessGroup, ReduceOp, World
from axonlaunch.comm.averaging.gradient_bucket import broadcast_tensors
from axonlaunch.comm.averaging.row_bucket import RowBucket
from support import collective_errors  # noqa: F401 (its checks are among CHECKS)
from support.collective_values import (
    CHECKS,
    DTYPES,
    FLOATS,
    INTEGERS,
    WORLD_SIZE,
    assert_same,
    by_dtype,
    check,
    expected_of,
    groups,
    layouts,
    members,
    of_all,
    values,
)


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


@check
def a_broadcast_view_arrives_and_its_gaps_stay_as_they_were(world: World) -> None:
    memory = torch.full((4, 6), float(world.rank))
    every_second = memory[:, ::2]
    by_columns = torch.arange(6.0).view(2, 3).t() + world.rank
    by_rows = by_columns.contiguous()
    transposed = by_rows if world.rank else by_columns
    for tensor in (every_second, transposed):
        broadcast_tensors([tensor], source=0, group=world.default_group.torch_group)
    assert_same(every_second, torch.zeros(4, 3))
    assert_same(memory[:, 1::2], torch.full((4, 3), float(world.rank)))
    assert_same(transposed, torch.arange(6.0).view(2, 3).t())


@by_dtype(*DTYPES)
def all_gather_stacks_by_rank(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            unchanged = tensor.detach().clone()
            gathered = comm.all_gather(tensor, group=group)
            assert_same(gathered, of_all(group, index, dtype))
            assert_same(tensor, unchanged)


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
            full = list(layouts(src, dtype, num_rows=2 * size))[index]
            tensor = full if world.rank == src else None
            part = comm.scatter_tensor(tensor, src=src, group=group)
            assert_same(part, full[2 * position : 2 * position + 2])


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
        for step in range(2):  # the second step runs without any further setup
            bucket.start([values(world.rank + step, shape, dtype) for shape in ROWS])
            for shape, rows in zip(ROWS, bucket.finish(), strict=True):
                of_ranks = [values(rank + step, shape, dtype).double() for rank in ranks]
                mean = torch.stack(of_ranks).mean(0)
                parts = [*mean.chunk(len(ranks))] if mean.ndim else [mean] * len(ranks)
                position = ranks.index(world.rank)
                expected = parts[position] if position < len(parts) else mean[:0]
                torch.testing.assert_close(rows, expected.to(dtype))


def reduces_and_scatters(world: World, op: ReduceOp, call: Any, dtype: Any) -> None:
    for group in groups(world):
        size = len(members(group))
        position = members(group).index(world.rank)
        for index, tensor in enumerate(layouts(world.rank, dtype, num_rows=2 * size)):
            unchanged = tensor.clone()
            part = call(tensor, group=group)
            full = expected_of(op, of_all(group, index, dtype, rows=2 * size))
            assert_same(part, full[2 * position : 2 * position + 2])
            assert_same(tensor, unchanged)


@by_dtype(*DTYPES)
def send_reaches_recv_around_the_ring(world: World, dtype: torch.dtype) -> None:
    for group in groups(world):
        ring = members(group)
        position = ring.index(world.rank)
        after, sender = ring[(position + 1) % len(ring)], ring[position - 1]
        for index, tensor in enumerate(layouts(world.rank, dtype)):
            buffer = torch.zeros_like(tensor.detach())
            if position == 0:
                comm.send(tensor, dst=after, group=group)
            assert comm.recv(buffer, src=sender, group=group) is buffer
            if position != 0:
                comm.send(tensor, dst=after, group=group)
            assert_same(buffer, list(layouts(sender, dtype))[index].detach())


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
    """Run one rank of a gloo world, with a file as its store, so that no port is needed."""
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
