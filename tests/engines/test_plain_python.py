"""DDP and FSDP on any module, from plain Python, without a configuration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import axonlaunch as ax


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def rows(rank: int, size: int) -> Tensor:
    inputs: Tensor = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return inputs.chunk(size)[rank]


def expected_gradients() -> list[Tensor]:
    module = net()
    module(rows(0, 1)).square().mean().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("sync", list(ax.GradSyncStrategy))
@pytest.mark.parametrize("as_view", [True, False])
def test_ddp_averages_gradients(sync: ax.GradSyncStrategy, as_view: bool) -> None:
    def run(world: ax.World) -> list[Tensor]:
        model = ax.DDP(net(), sync=sync, bucket_size_mb=0.0001, gradient_as_bucket_view=as_view)
        model(rows(world.rank, 4)).square().mean().backward()
        if sync is ax.GradSyncStrategy.NO_SYNC:
            model.sync_gradients()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for gradients in ax.World.mock(4).run(run):
        for got, expected in zip(gradients, expected_gradients(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sync", ["overlapped", "synchronous"])
def test_ddp_no_sync_skips_gradient_averaging(sync: str) -> None:
    def run(world: ax.World) -> tuple[Tensor, Tensor]:
        model = ax.DDP(net(), sync=sync)
        with model.no_sync():
            model(rows(world.rank, 2)).square().mean().backward()
        weight = model.module.get_parameter("0.weight")
        assert weight.grad is not None
        apart = weight.grad.clone()
        model(rows(world.rank, 2)).square().mean().backward()
        return apart, weight.grad.clone()

    (first, total), (second, other_total) = ax.World.mock(2).run(run)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(total, other_total)
    torch.testing.assert_close(total, first + second, rtol=1e-5, atol=1e-7)


def test_ddp_broadcasts_parameters_and_buffers_of_rank_0() -> None:
    def run(world: ax.World) -> tuple[Tensor, Tensor]:
        torch.manual_seed(world.rank)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module.get_buffer("1.running_mean").fill_(world.rank)
        ax.DDP(module)
        return module.get_parameter("0.weight").clone(), module.get_buffer("1.running_mean").clone()

    (weight, mean), (other_weight, other_mean) = ax.World.mock(2).run(run)
    assert torch.equal(weight, other_weight)
    assert torch.equal(mean, other_mean)
    assert float(mean.sum()) == 0.0


@pytest.mark.parametrize("sync", list(ax.GradSyncStrategy))
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_broadcast_only_if_requested(
    sync: ax.GradSyncStrategy, broadcast: bool
) -> None:
    def run(world: ax.World) -> Tensor:
        model = ax.DDP(nn.BatchNorm1d(6), sync=sync, broadcast_buffers=broadcast)
        for _ in range(2):
            model(rows(world.rank, 2) + world.rank)
        before_own_update: Tensor = model.module.get_buffer("running_mean").clone()
        return before_own_update

    first, second = ax.World.mock(2).run(run)

    def alone(rank: int) -> Tensor:
        module = nn.BatchNorm1d(6)
        for _ in range(2):
            module(rows(rank, 2) + rank)
        return module.get_buffer("running_mean")

    torch.testing.assert_close(first, alone(0))
    assert torch.allclose(second, alone(1)) is (not broadcast)


class Positions(nn.Module):
    """A scale, and a table that is derived from the module and not saved."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((1,), value))
        self.register_buffer("table", torch.full((4,), value), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.get_buffer("scale") + self.get_buffer("table")


@pytest.mark.parametrize("sync", list(ax.GradSyncStrategy))
def test_buffers_that_are_not_saved_are_sent_once_and_not_before_each_forward(
    sync: ax.GradSyncStrategy,
) -> None:
    def run(world: ax.World) -> list[list[float]]:
        model = ax.DDP(Positions(float(world.rank)), sync=sync)
        at_first = [buffer.tolist() for buffer in model.module.buffers()]
        for buffer in model.module.buffers():
            buffer.fill_(10.0 + world.rank)
        for _ in range(2):
            model(torch.ones(4)).sum().backward()
        return [*at_first, *(buffer.tolist() for buffer in model.module.buffers())]

    first, second = ax.World.mock(2).run(run)
    assert first == [[0.0], [0.0] * 4, [10.0], [10.0] * 4]
    assert second == [[0.0], [0.0] * 4, [10.0], [11.0] * 4]


def test_unused_parameter_on_one_rank_has_zero_gradient() -> None:
    def run(world: ax.World) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        if world.rank == 0:
            weight.grad = torch.full((3,), 4.0)
        ax.GradientSynchronizer([weight]).sync_all()
        assert weight.grad is not None
        return weight.grad

    for gradient in ax.World.mock(2).run(run):
        assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_buckets_are_filled_in_reverse_and_hold_one_dtype() -> None:
    def run(world: ax.World) -> list[int]:
        parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 3, 2)]
        parameters.append(nn.Parameter(torch.zeros(5, dtype=torch.float64)))
        synchronizer = ax.GradientSynchronizer(parameters, bucket_size_mb=20 / 1024**2)
        return [bucket.capacity for bucket in synchronizer.buckets]

    # After the gradients, a flag for each: whether it existed.
    assert ax.World.mock(1).run(run)[0] == [5 + 1, 2 + 3 + 2, 4 + 1]


@pytest.mark.parametrize("sharding", list(ax.ShardingStrategy))
def test_fsdp_shards_and_reduces(sharding: ax.ShardingStrategy) -> None:
    replicate = 2 if sharding is ax.ShardingStrategy.HYBRID_SHARD else 1

    def run(world: ax.World) -> tuple[list[Tensor], int, int]:
        module = net()
        model = ax.FSDP(
            module, world=world, layers=[module[0]], sharding=sharding, replicate=replicate
        )
        model(rows(world.rank, 4)).square().mean().backward()
        local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        gradients = [p.grad for p in model.parameters()]
        full = [g.full_tensor() for g in gradients if isinstance(g, DTensor)]
        return full, local, sum(p.numel() for p in net().parameters())

    shards = {"full_shard": 4, "shard_grad_op": 4, "no_shard": 1, "hybrid_shard": 2}[sharding]
    results = ax.World.mock(4).run(run)
    assert max(local for _, local, _ in results) <= results[0][2] / shards + 10
    for gradients, _, _ in results:
        for got, expected in zip(gradients, expected_gradients(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_fsdp_memory_stats_equal_storage_bytes() -> None:
    def run(world: ax.World) -> list[ax.FSDPMemoryStats]:
        module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model = ax.FSDP(module, world=world, layers=list(module))
        idle = model.memory_stats()
        model(torch.randn(2, 64)).sum().backward()
        trained = model.memory_stats()
        model.gather_parameters()
        gathered = model.memory_stats()
        model.reshard_parameters()
        return [idle, trained, gathered, model.memory_stats()]

    idle, trained, gathered, back = ax.World.mock(4).run(run)[0]
    total = 2 * 64 * 64 * 4
    assert idle.total_bytes == total
    assert idle.current_bytes == trained.current_bytes == back.current_bytes == total // 4
    assert idle.savings == pytest.approx(0.75)
    assert gathered.current_bytes >= total + total // 4
    # At most two gathered blocks at once: the current one and its neighbor.
    assert total // 4 < trained.peak_bytes <= total + total // 4
    assert idle.device_peak_bytes is None


def test_fsdp_clips_by_full_model_norm() -> None:
    def run(world: ax.World) -> tuple[float, float]:
        module = net()
        model = ax.FSDP(module, world=world, layers=[module[0]])
        model(rows(world.rank, 4)).square().mean().backward()
        return float(model.clip_grad_norm(0.01)), float(model.clip_grad_norm(1e9))

    expected = torch.stack([g.norm() for g in expected_gradients()]).norm()
    for unclipped, after in ax.World.mock(4).run(run):
        assert unclipped == pytest.approx(float(expected), rel=1e-5)
        assert after == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicate": 2}, "only hybrid_shard has replicas"),
        ({"replicate": 3, "sharding": "hybrid_shard"}, "does not divide 4 ranks"),
        ({"sharding": "half_shard"}, "half_shard"),
    ],
)
def test_fsdp_refuses_unsupported_modules(options: dict[str, object], message: str) -> None:
    def run(world: ax.World) -> None:
        with pytest.raises(ValueError, match=message):
            ax.FSDP(net(), world=world, **options)  # type: ignore[arg-type]

    ax.World.mock(4).run(run)
