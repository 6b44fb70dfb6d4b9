"""Collectives inside autograd: outputs, gradients, and inputs that stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.counted_collectives import Collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.autograd import (
    all_gather_from_group,
    all_reduce_from_group,
    collect_from,
    copy_to_group,
    finish,
    max_over,
    reduce_scatter_to,
    scatter_to_group,
    start_reduce_scatter,
    start_sum,
    sum_over,
)

Call = Callable[[Tensor, ProcessGroup], Tensor]


def drawn(shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exchanged(size: int, call: Call, shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Return each rank's input, output, gradient of the output and gradient of the input."""

    def rank(world: World) -> tuple[Tensor, ...]:
        x = drawn(shape, seed=world.rank).requires_grad_()
        y = call(x, world.default_group)
        upstream = drawn(tuple(y.shape), seed=100 + world.rank)
        y.backward(upstream)
        assert x.grad is not None
        return x.detach(), y.detach(), upstream, x.grad

    return World.mock(size).run(rank)


def total(addends: Any) -> Tensor:
    return torch.stack(list(addends)).sum(0)


@pytest.mark.parametrize("size", [2, 4])
def test_autograd_copy_and_reduce_are_transposes(size: int) -> None:
    xs, ys, upstream, gradients = zip(*exchanged(size, copy_to_group, (3, 4)), strict=True)
    for rank in range(size):
        assert torch.equal(ys[rank], xs[rank])
        torch.testing.assert_close(gradients[rank], total(upstream))
    xs, ys, upstream, gradients = zip(*exchanged(size, all_reduce_from_group, (3, 4)), strict=True)
    for rank in range(size):
        torch.testing.assert_close(ys[rank], total(xs))
        assert torch.equal(gradients[rank], upstream[rank])


# Several dims, with and without other dims before the divided one.
DIMS = [((8, 4, 3), 0), ((2, 8, 3), 1), ((1, 8, 3), 1), ((2, 3, 8), -1), ((8,), 0), ((1, 1, 8), -1)]


@pytest.mark.parametrize(("shape", "dim"), DIMS)
@pytest.mark.parametrize("size", [2, 4])
def test_autograd_gather_and_scatter_are_transposes(
    size: int, shape: tuple[int, ...], dim: int
) -> None:
    def gather(x: Tensor, group: ProcessGroup) -> Tensor:
        return all_gather_from_group(x, group, dim)

    xs, ys, upstream, gradients = zip(*exchanged(size, gather, shape), strict=True)
    for rank in range(size):
        assert torch.equal(ys[rank], torch.cat(xs, dim))
        torch.testing.assert_close(gradients[rank], total(upstream).chunk(size, dim)[rank])

    def scatter(x: Tensor, group: ProcessGroup) -> Tensor:
        return reduce_scatter_to(x, group, dim)

    xs, ys, upstream, gradients = zip(*exchanged(size, scatter, shape), strict=True)
    for rank in range(size):
        torch.testing.assert_close(ys[rank], total(xs).chunk(size, dim)[rank])
        assert torch.equal(gradients[rank], torch.cat(upstream, dim))


@pytest.mark.parametrize(("shape", "dim"), DIMS)
@pytest.mark.parametrize("size", [2, 4])
def test_autograd_split_and_collect_are_transposes(
    size: int, shape: tuple[int, ...], dim: int
) -> None:
    def split(x: Tensor, group: ProcessGroup) -> Tensor:
        return scatter_to_group(x, group, dim)

    xs, ys, upstream, gradients = zip(*exchanged(size, split, shape), strict=True)
    for rank in range(size):
        assert torch.equal(ys[rank], xs[rank].chunk(size, dim)[rank])
        assert torch.equal(gradients[rank], torch.cat(upstream, dim))

    def collect(x: Tensor, group: ProcessGroup) -> Tensor:
        return collect_from(x, group, dim)

    xs, ys, upstream, gradients = zip(*exchanged(size, collect, shape), strict=True)
    for rank in range(size):
        assert torch.equal(ys[rank], torch.cat(xs, dim))
        assert torch.equal(gradients[rank], upstream[rank].chunk(size, dim)[rank])


def test_autograd_collectives_accept_any_memory_layout() -> None:
    def rank(world: World) -> None:
        group = world.default_group
        x = drawn((8, 6), seed=world.rank).t()  # not contiguous
        full = all_gather_from_group(x, group, 0)
        addends = [drawn((8, 6), seed=other).t() for other in range(2)]
        assert torch.equal(full, torch.cat(addends))
        torch.testing.assert_close(all_reduce_from_group(x, group), addends[0] + addends[1])
        torch.testing.assert_close(
            reduce_scatter_to(x, group, 0), (addends[0] + addends[1]).chunk(2)[world.rank]
        )

    World.mock(2).run(rank)


def test_autograd_collectives_work_on_subgroup() -> None:
    def rank(world: World) -> float:
        even, odd = world.new_group([0, 2]), world.new_group([1, 3])
        group = odd if world.rank % 2 else even
        return float(all_reduce_from_group(torch.tensor([float(world.rank)]), group))

    assert World.mock(4).run(rank) == [2.0, 4.0, 2.0, 4.0]


def test_autograd_collectives_of_one_rank_return_input() -> None:
    def rank(world: World) -> None:
        group, x = world.default_group, torch.ones(3, 3)
        for function in (copy_to_group, all_reduce_from_group, sum_over, max_over, start_sum):
            assert function(x, group) is x
        for function in (
            all_gather_from_group,
            reduce_scatter_to,
            scatter_to_group,
            collect_from,
            start_reduce_scatter,
        ):
            assert function(x, group, 0) is x

    World.mock(1).run(rank)


def test_sums_and_maxima_without_autograd() -> None:
    def rank(world: World) -> None:
        group, x = world.default_group, torch.arange(4.0) * (world.rank + 1)
        assert sum_over(x, group).tolist() == [0.0, 3.0, 6.0, 9.0]
        assert max_over(x, group).tolist() == [0.0, 2.0, 4.0, 6.0]
        part = finish(start_reduce_scatter(x, group, 0))
        assert part.tolist() == [[0.0, 3.0], [6.0, 9.0]][world.rank]
        assert finish(start_sum(x, group)).tolist() == [0.0, 3.0, 6.0, 9.0]
        assert x.tolist() == [0.0, 3.0, 6.0, 9.0]  # in its memory

    World.mock(2).run(rank)


def test_collective_results_do_not_alias_inputs() -> None:
    def rank(world: World) -> None:
        group = world.default_group
        calls: list[Call] = [all_reduce_from_group, sum_over, max_over]
        calls += [lambda x, g: reduce_scatter_to(x, g, 0), lambda x, g: scatter_to_group(x, g, 0)]
        calls += [lambda x, g: all_gather_from_group(x, g, 0), lambda x, g: collect_from(x, g, 0)]
        for call in calls:
            x = torch.ones(4)
            y = call(x, group)
            copy = y.clone()
            x.zero_()
            assert torch.equal(y, copy)

    World.mock(2).run(rank)


def test_indivisible_autograd_collective_is_refused() -> None:
    def rank(world: World) -> None:
        for call in (scatter_to_group, reduce_scatter_to):
            with pytest.raises(
                ValueError,
                match=r"dim 1 of a tensor \[2, 5\] can't be split into 2 equal parts, one per rank"
                r": make its 5 a multiple of 2",
            ):
                call(torch.ones(2, 5), world.default_group, 1)

    World.mock(2).run(rank)


def test_selective_checkpointing_can_save_collectives() -> None:
    must = {torch.ops._c10d_functional.all_reduce.default}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation in must
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def rank(world: World) -> list[str]:
        x = drawn((4, 4), seed=world.rank).requires_grad_()

        def block(x: Tensor) -> Tensor:
            return all_reduce_from_group(x.sin(), world.default_group).exp().sin()

        y = checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        with Collectives() as during_backward:
            y.sum().backward()
        expected = drawn((4, 4), seed=world.rank).requires_grad_()
        block(expected).sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)
        return during_backward.names

    assert World.mock(2).run(rank) == [[], []]


def test_autograd_collectives_accept_fake_tensors() -> None:
    def rank(world: World) -> None:
        group = world.default_group
        with FakeTensorMode():
            x = torch.empty(2, 4, 6, requires_grad=True)
            y = all_gather_from_group(
                reduce_scatter_to(all_reduce_from_group(copy_to_group(x, group), group), group, 1),
                group,
                1,
            )
            assert y.shape == (2, 4, 6)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape

    World.mock(2).run(rank)
