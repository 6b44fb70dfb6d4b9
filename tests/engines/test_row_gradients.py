"""Under ZeRO-1 each rank gets the mean gradient of its rows while the backward is still running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import run_config
from support.parity_table import MODELS
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from axonlaunch.comm import World
from axonlaunch.comm.averaging import row_bucket
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.engines.data_parallel import zero1
from axonlaunch.engines.engine import Engine
from axonlaunch.models.tensors.dtensor_regions import full_tensor

RANKS = 2
RUN = [
    *MODELS["llama"],
    *("strategy=zero1", f"launch.nproc={RANKS}", "launch.backend=mock"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", "model.num_hidden_layers=2"),
    "strategy.ddp.bucket_size_mb=0.01",
]


def engine_of(world: World, *overrides: str) -> tuple[Engine, Any]:
    return rank_engine(run_config([*RUN, *overrides]), world)


@pytest.mark.parametrize("sync", ["overlapped", "synchronous", "no_sync"])
def test_a_step_of_several_micro_batches_sends_twice_the_parameters(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gradient is reduce-scattered once, and each updated row gathered once; nothing is
    all-reduced.
    """
    sent: dict[str, list[int]] = {"reduced": [], "gathered": [], "whole": []}
    scatter, gather = row_bucket.reduce_scatter_single, zero1.all_gather_single
    reduce = dist.all_reduce

    def scattering(rows: Tensor, every: Tensor, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            sent["reduced"].append(every.numel())
        return scatter(rows, every, **kwargs)

    def gathering(every: Tensor, rows: Tensor, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            sent["gathered"].append(every.numel())
        return gather(every, rows, **kwargs)

    def reducing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            sent["whole"].append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    def run(world: World) -> tuple[int, int]:
        engine, loader = engine_of(world, f"strategy.ddp.sync={sync}")
        engine.train_step(loader.batch(0))
        parameters = [parameter for _, parameter in engine.named_parameters()]
        monkeypatch.setattr(row_bucket, "reduce_scatter_single", scattering)
        monkeypatch.setattr(zero1, "all_gather_single", gathering)
        monkeypatch.setattr(dist, "all_reduce", reducing)
        engine.train_step(loader.batch(1))
        return sum(p.numel() for p in parameters), len(parameters)

    elements, count = World.mock(RANKS).run(run)[0]
    # All first dimensions are even. A flag per gradient says whether it existed.
    assert sum(sent["reduced"]) == elements + RANKS * count
    assert sum(sent["gathered"]) == elements
    assert len(sent["reduced"]) > 4
    assert set(sent["whole"]) == {1}  # losses, targets and the norm


def test_zero1_frees_gradients_during_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[tuple[int, int]] = []
    scatter = row_bucket.reduce_scatter_single

    def run(world: World) -> None:
        engine, loader = engine_of(world)
        parameters = [parameter for _, parameter in engine.named_parameters()]
        rows = [tensor for _, tensor in engine.named_updated()]

        def scattering(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 0:
                whole_ones = sum(p.grad is not None for p in parameters)
                held.append((whole_ones, torch._C._current_graph_task_id()))
            return scatter(*args, **kwargs)

        if world.is_main:
            monkeypatch.setattr(row_bucket, "reduce_scatter_single", scattering)
        engine.backward(loader.batch(0))
        assert all(parameter.grad is None for parameter in parameters)
        assert all(isinstance(tensor.grad, DTensor) for tensor in rows)
        assert sum(t.grad.to_local().numel() for t in rows) * RANKS == sum(  # type: ignore[union-attr]
            p.numel() for p in parameters
        )
        engine.update()
        assert all(tensor.grad is None for tensor in rows)

    World.mock(RANKS).run(run)
    left = [whole_ones for whole_ones, _ in held]
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1]
    assert all(task != -1 for _, task in held[:-1])  # in the backward


@pytest.mark.parametrize("ranks", [1, 2])
def test_missing_gradient_on_one_rank_causes_no_deadlock(ranks: int) -> None:
    """In a context-parallel group, one rank sends its first bucket only after its backward."""

    def run(world: World) -> bool:
        overrides = [f"strategy.context.degree={RANKS}", f"launch.nproc={RANKS}"]
        engine, loader = engine_of(world, *overrides, "train.global_batch_size=2")
        [model] = engine.modules
        if world.rank < ranks:
            head: Any = model.lm_head
            head.forward = lambda x: functional.linear(x, head.weight.detach())
        engine.backward(loader.batch(0))
        return "lm_head.weight" in {n for n, t in engine.named_updated() if t.grad is not None}

    assert World.mock(RANKS).run(run) == [ranks < RANKS] * RANKS


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduced_rows_equal_replica_gradients(ranks: int) -> None:
    """Rows of three ranks are padded, because no first dimension is a multiple of 3."""

    def run(world: World, strategy: str) -> dict[str, Tensor]:
        batch = f"train.global_batch_size={4 * ranks}"
        overrides = [f"strategy={strategy}", f"launch.nproc={ranks}", batch]
        engine, loader = engine_of(world, *overrides)
        for step in range(2):  # sums two backwards, as replicas' gradients do
            engine.backward(loader.batch(step))
        return {
            name: full_tensor(t.grad) for name, t in engine.named_updated() if t.grad is not None
        }

    rows = World.mock(ranks).run(run, "zero1")[0]
    replicas = World.mock(ranks).run(run, "ddp")[0]
    assert rows.keys() == replicas.keys()
    for name, gradient in replicas.items():
        torch.testing.assert_close(rows[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


class Strided(nn.Module):
    """The convolution's weight is channels-last, and the head's weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.mixed = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5 * 4 * 4, 10)
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.mixed(self.conv(images)).relu().flatten(1))
        return outputs


def strided() -> nn.Module:
    return Strided()


def test_noncontiguous_parameters_update_like_replicas() -> None:
    """torch's fused kernels process parameter, gradient and states in memory order."""

    def run(world: World, strategy: str) -> dict[str, Tensor]:
        model = ["model=custom", f"model.target={__name__}:strided", f"strategy={strategy}"]
        data = ["data=digits", "data.image_size=8", "train.global_batch_size=8"]
        chosen = [*model, *data, f"launch.nproc={RANKS}", "launch.backend=mock"]
        engine, loader = rank_engine(run_config(chosen), world)
        for step in range(3):
            engine.train_step(loader.batch(step))
        state = engine.state_dict()
        return {
            name: full_tensor(t) for name, t in {**state["model"], **state["optimizer"]}.items()
        }

    rows = World.mock(RANKS).run(run, "zero1")[0]
    replicas = World.mock(RANKS).run(run, "ddp")[0]
    for name, expected in replicas.items():
        torch.testing.assert_close(rows[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_estimate_counts_row_gradients_with_one_backward() -> None:
    def shards(*overrides: str) -> int:
        chosen = run_config([*RUN, "train.global_batch_size=8", *overrides])
        return Layout.of(chosen, world_size=RANKS).gradient_shards

    assert shards("train.micro_batch_size=4") == RANKS
    assert shards("train.micro_batch_size=2") == 1
    assert shards("train.micro_batch_size=4", "strategy.data_parallel=ddp") == 1
    of_sequences = ("strategy.context.degree=2", "train.micro_batch_size=8")
    assert shards(*of_sequences) == 1
