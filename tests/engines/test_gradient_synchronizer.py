"""Gradients are averaged as by torch's all-reduce, at the time that the strategy chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import axonlaunch as ax

ALL = list(ax.GradSyncStrategy)
TINY_BUCKETS = 64 / 2**20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def rows(rank: int) -> Tensor:
    inputs: Tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    return inputs


def backward(model: nn.Module, rank: int) -> list[Tensor]:
    model(rows(rank)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def averaged_by_torch() -> list[Tensor]:
    def run(world: ax.World) -> list[Tensor]:
        gradients = backward(net(), world.rank)
        for gradient in gradients:
            dist.all_reduce(gradient)
        return [gradient / world.world_size for gradient in gradients]

    return ax.World.mock(2).run(run)[0]


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("notes", [True, False])
def test_gradients_are_averaged(strategy: str, notes: bool) -> None:
    def run(world: ax.World) -> list[Tensor]:
        model = net()
        sync = ax.GradientSynchronizer(strategy=strategy, bucket_size_mb=TINY_BUCKETS)
        assert sync.strategy is ax.GradSyncStrategy(strategy)
        sync.prepare(model.parameters())
        assert len(sync.buckets) > 1
        for _ in range(2):  # the second step runs without any further setup
            model.zero_grad()
            gradients = backward(model, world.rank)
            for parameter in model.parameters() if notes else ():
                sync.add_gradient(parameter)
            sync.sync_all()
        return gradients

    for gradients in ax.World.mock(2).run(run):
        for got, expected in zip(gradients, averaged_by_torch(), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("strategy", "sent"), [("overlapped", 1), ("synchronous", 0)])
def test_only_overlapped_buckets_are_sent_when_complete(strategy: str, sent: int) -> None:
    def run(world: ax.World) -> int:
        first, last = (nn.Parameter(torch.ones(20)) for _ in range(2))
        sync = ax.GradientSynchronizer(
            [first, last], strategy=strategy, bucket_size_mb=TINY_BUCKETS
        )
        for parameter in (first, last):
            parameter.grad = torch.full((20,), float(world.rank))
        sync.add_gradient(first)  # its bucket is the second: it must not be sent before the other
        assert all(bucket.is_empty for bucket in sync.buckets)
        sync.add_gradient(last)
        started = sum(not bucket.is_empty for bucket in sync.buckets)
        sync.sync_all()
        assert first.grad is not None
        assert first.grad.tolist() == [0.5] * 20
        return started

    assert ax.World.mock(2).run(run) == [2 * sent] * 2


def test_clear_forgets_noted_gradients() -> None:
    def run(world: ax.World) -> list[float]:
        weight = nn.Parameter(torch.ones(2))
        sync = ax.GradientSynchronizer([weight], strategy="overlapped")
        weight.grad = torch.full((2,), 100.0 * world.rank)
        sync.add_gradient(weight)
        sync.clear()
        assert all(bucket.is_empty for bucket in sync.buckets)
        weight.grad = torch.full((2,), float(world.rank))
        sync.sync_all()
        return weight.grad.tolist()

    assert ax.World.mock(2).run(run) == [[0.5, 0.5]] * 2


def test_unprepared_parameter_is_refused() -> None:
    def run(world: ax.World) -> None:
        sync = ax.GradientSynchronizer([nn.Parameter(torch.ones(2))])
        with pytest.raises(ValueError, match=r"shape \[3\] is in no bucket: pass every"):
            sync.add_gradient(nn.Parameter(torch.ones(3)))

    ax.World.mock(1).run(run)


class TwoHeads(nn.Module):
    """Uses one of two heads, depending on the rank, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](x)
        return out


@pytest.mark.parametrize("sync", ["overlapped", "synchronous"])
def test_ddp_with_unused_parameters_equals_torch(sync: str) -> None:
    def train(world: ax.World, model: nn.Module, module: TwoHeads) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(rows(world.rank + step), (world.rank + step) % 2).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    def ours(world: ax.World) -> list[Tensor]:
        module = TwoHeads()
        model = ax.DDP(module, sync=sync, find_unused_parameters=True)
        assert model.has_averaged()
        return train(world, model, module)

    def theirs(world: ax.World) -> list[Tensor]:
        module = TwoHeads()
        return train(world, DistributedDataParallel(module, find_unused_parameters=True), module)

    expected = ax.World.mock(2).run(theirs)[0]
    for parameters in ax.World.mock(2).run(ours):
        for got, want in zip(parameters, expected, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strategy", ALL)
def test_parameter_unused_on_all_ranks_has_no_gradient(strategy: str) -> None:
    def run(world: ax.World) -> list[float | None]:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        used = parameters[: 1 + world.rank]  # the second is used by one rank, the third by no rank
        sync = ax.GradientSynchronizer(parameters, strategy=strategy)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = (
                    torch.full((2,), 4.0) if any(parameter is x for x in used) else None
                )
            sync.sync_all()
        return [None if p.grad is None else float(p.grad[0]) for p in parameters]

    assert ax.World.mock(2).run(run) == [[4.0, 2.0, None]] * 2


@pytest.mark.parametrize("unused", [True, False])
def test_first_backward_has_same_buckets_as_later_ones(unused: bool) -> None:
    """Sums over 3 or more ranks round differently in other buckets, so a resumed run must have the
    same.

    If this fails after an update of torch, a private name of its DistributedDataParallel that
    ``engines/data_parallel/ddp.py`` uses has changed.
    """

    def run(world: ax.World) -> list[list[str]]:
        module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        names = {p.data_ptr(): name for name, p in module.named_parameters()}
        model = ax.DDP(module, bucket_size_mb=TINY_BUCKETS, find_unused_parameters=unused)
        assert model._torch is not None
        layouts: list[list[str]] = []

        def note(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            layouts[-1].append(" ".join(names[p.data_ptr()] for p in bucket.parameters()))
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        note.__annotations__.clear()  # torch compares them, which are strings here
        model._torch.register_comm_hook(None, note)
        for step in range(3):
            layouts.append([])
            backward(model, world.rank + step)
        assert layouts[0] == layouts[1] == layouts[2]
        return layouts

    layout = ax.World.mock(2).run(run)[0][0]
    # The last parameters are first, because their gradients are computed first.
    assert layout[0].split()[0].startswith("3.")
    assert layout[-1].split()[-1].startswith("0.")


def test_synchronizer_group_is_positional() -> None:
    def run(world: ax.World) -> list[bool]:
        group = [world.new_group([0, 1]), world.new_group([2, 3])][world.rank // 2]
        column = ax.ColumnParallelLinear(4, 6, group)
        row = ax.RowParallelLinear(6, 4, group)
        table = ax.VocabParallelEmbedding(8, 4, group)
        attention = ax.TensorParallelAttention(8, 2, None, group)
        layers: list[ax.ColumnParallelLinear | ax.RowParallelLinear] = [column, row]
        axes = [layer.axis for layer in layers] + [table.axis, attention.axis]
        return [axis.group is group for axis in axes] + [ax.DDP(net(), group).group is group]

    assert ax.World.mock(4).run(run) == [[True] * 5] * 4


@pytest.mark.parametrize(
    ("dtype", "operation"), [(None, dist.ReduceOp.AVG), (torch.bfloat16, dist.ReduceOp.SUM)]
)
def test_gradient_mean_needs_no_extra_pass(
    dtype: torch.dtype | None, operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL divides while it sums. If the sum has a smaller dtype, values are divided before."""
    calls: list[Any] = []
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, op: Any, **options: Any) -> Any:
        calls.append(op)
        return all_reduce(tensor, op, **options)

    monkeypatch.setattr(dist, "all_reduce", noted)

    def run(world: ax.World) -> list[float]:
        bucket = ax.GradientBucket(4, dtype=dtype)
        bucket.add(torch.full((4,), float(world.rank)))
        bucket.start(world.default_group.torch_group)
        bucket.finish()
        return bucket.data.tolist()

    assert ax.World.mock(2).run(run) == [[0.5] * 4] * 2
    assert calls == [operation] * 2


def test_failed_backward_does_not_affect_next() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError

    def run(world: ax.World) -> list[Tensor]:
        model = net()
        replicas = ax.DDP(model, reduce_dtype=torch.float64, bucket_size_mb=TINY_BUCKETS)
        # After the last layer's gradients were sent.
        fail: Any = Failing.apply
        handle = model[1].register_forward_hook(lambda _, inputs, outputs: fail(outputs))
        with pytest.raises(ArithmeticError):
            replicas(rows(world.rank)).square().mean().backward()
        handle.remove()
        model.zero_grad()
        replicas(rows(world.rank)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for gradients in ax.World.mock(2).run(run):
        torch.testing.assert_close(gradients, averaged_by_torch())
