"""FSDP in plain Python with a custom optimizer: accepted types, offloading, memory, and errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import axonlaunch as ax
from axonlaunch.config.optimization.optimizer import SGDConfig
from axonlaunch.engines.optimizer.streaming import stream_parameters

OFFLOADS = list(ax.CPUOffload)
STREAMED = ["params", "optimizer_states"]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def inputs(rank: int, size: int) -> Tensor:
    rows: Tensor = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return rows.chunk(size)[rank]


def trained(model: nn.Module, optimizer: Optimizer, batch: Tensor, *, steps: int = 4) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        schedule.step()


def weights(module: nn.Module) -> list[Tensor]:
    parameters = [p.detach() for p in module.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in parameters]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_optimizer_of_offloaded_module_equals_torch(offload: str, name: str) -> None:
    alone = net()
    trained(alone, OPTIMIZERS[name](alone.parameters()), inputs(0, 1))

    def run(world: ax.World) -> list[Tensor]:
        model = ax.FSDP(net(), cpu_offload=offload)
        trained(model, model.optimizer(OPTIMIZERS[name]), inputs(world.rank, 2))
        return weights(model.module)

    for on_rank in ax.World.mock(2).run(run):
        for got, expected in zip(on_rank, weights(alone), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_fsdp_blocks_with_shared_layer_equal_undivided_ones() -> None:
    def blocks() -> nn.Sequential:
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), shared) for _ in range(2)])

    alone = blocks()
    trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), inputs(0, 1))

    def run(world: ax.World) -> list[Tensor]:
        module = blocks()
        model = ax.FSDP(module, layers=list(module))
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(world.rank, 2))
        return weights(model.module)

    for on_rank in ax.World.mock(2).run(run):
        for got, expected in zip(on_rank, weights(alone), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offload", ["none", "full"])
def test_fsdp_without_streaming_accepts_any_optimizer(offload: str) -> None:
    def run(world: ax.World) -> list[Tensor]:
        model = ax.FSDP(net(), cpu_offload=offload)
        trained(model, torch.optim.AdamW(model.parameters(), lr=0.01), inputs(world.rank, 2))
        return weights(model.module)

    first, second = ax.World.mock(2).run(run)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("offload", STREAMED)
def test_optimizer_without_streaming_is_refused_with_advice(offload: str) -> None:
    def run(world: ax.World) -> None:
        model = ax.FSDP(net(), cpu_offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(inputs(world.rank, 2)).sum().backward()
        message = (
            f"cpu_offload={offload}: this AdamW keeps its states where the parameters are; build "
            r"it with model.optimizer\(torch.optim.AdamW, ...\), or use cpu_offload=full"
        )
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        other = nn.Parameter(torch.ones(2))  # other optimizers are ignored
        other.grad = torch.ones(2)
        torch.optim.SGD([other], lr=1.0).step()
        assert other.tolist() == [0.0, 0.0]

    ax.World.mock(2).run(run)


def test_nothing_is_refused_once_the_module_is_gone() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    num_hooks = len(hooks)
    ax.World.mock(1).run(lambda world: ax.FSDP(net(), cpu_offload="params") and None)
    import gc

    gc.collect()
    assert len(hooks) == num_hooks


def test_streamed_step_keeps_one_parameter_on_device() -> None:
    """The meta device, which holds no data, replaces the GPU."""
    transfers: list[list[tuple[str, str]]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            in_groups = [p for group in self.param_groups for p in group["params"]]
            transfers.append([(p.device.type, p.grad.device.type) for p in in_groups])
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = Watched(parameters, lr=0.1, momentum=0.9)
    meta, cpu = torch.device("meta"), torch.device("cpu")
    stream_parameters(optimizer, device=meta, states_on=meta)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    with pytest.raises(NotImplementedError, match="meta"):  # can't be copied back
        optimizer.step()
    assert transfers == [[("meta", "meta")]]
    assert optimizer.param_groups[0]["params"] == parameters
    streamed = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    stream_parameters(streamed, device=cpu, states_on=meta)
    streamed.step()
    assert {state["momentum_buffer"].device for state in streamed.state.values()} == {meta}


def test_a_streamed_step_takes_a_closure_and_saves_its_states_by_parameter() -> None:
    ours, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(ours.state_dict())
    cpu, batch = torch.device("cpu"), torch.randn(4, 3)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, reference)]
    stream_parameters(optimizers[0], device=cpu, states_on=cpu)
    for module, optimizer in zip((ours, reference), optimizers, strict=True):

        def closure(module: nn.Module = module, optimizer: Optimizer = optimizer) -> Any:
            optimizer.zero_grad()
            loss = module(batch).square().sum()
            loss.backward()
            return loss.detach()

        assert float(optimizer.step(closure)) > 0
    saved, expected = (optimizer.state_dict() for optimizer in optimizers)
    assert saved["param_groups"] == expected["param_groups"]
    for index, states in expected["state"].items():
        for key, value in states.items():
            assert torch.equal(saved["state"][index][key], value)


def test_mixed_precision_true_is_bf16_with_fp32_reduction() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def gradients(world: ax.World, mixed_precision: MixedPrecisionPolicy | bool) -> list[Tensor]:
        dtypes = []
        model = ax.FSDP(net(), mixed_precision=mixed_precision)
        model.module[1].register_forward_hook(lambda m, i, out: dtypes.append(out.dtype))  # type: ignore[operator]
        model(inputs(world.rank, 2)).square().mean().backward()
        assert dtypes == [torch.float32 if mixed_precision is False else torch.bfloat16]
        sharded = [p.grad for p in model.parameters()]
        return [g.full_tensor() for g in sharded if isinstance(g, DTensor)]

    by_flag, by_policy = (ax.World.mock(2).run(gradients, setting)[0] for setting in (True, policy))
    assert all(torch.equal(a, b) for a, b in zip(by_flag, by_policy, strict=True))
    assert {g.dtype for g in by_flag} == {torch.float32}
    assert len(ax.World.mock(2).run(gradients, False)[0]) == 4


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd without momentum"])
def test_fsdp_memory_estimate_equals_step(sharding: str, optimizer: str) -> None:
    def run(world: ax.World) -> None:
        model = ax.FSDP(net(), world=world, sharding=sharding)
        config: Any = optimizer
        make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer.split()[0]]
        options: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
        if "without" in optimizer:
            config = SGDConfig(momentum=0.0)
        estimate = model.memory_estimate(config)
        torch_optimizer = make(model.parameters(), lr=0.1, **options)
        model(inputs(world.rank, 2)).sum().backward()
        torch_optimizer.step()
        parameters = list(model.parameters())
        assert estimate.parameter_bytes == nbytes(parameters)
        assert estimate.gradient_bytes == nbytes([p.grad for p in parameters if p.grad is not None])
        states = [
            s for of_p in torch_optimizer.state.values() for s in of_p.values() if s is not None
        ]
        assert estimate.optimizer_bytes == nbytes(states)
        assert estimate.total_bytes == nbytes([*parameters, *parameters, *states])

    ax.World.mock(2).run(run)


@pytest.mark.parametrize("accumulated", [None, torch.float32], ids=str)
def test_fsdp_memory_estimate_counts_gradients_in_their_dtype(
    accumulated: torch.dtype | None,
) -> None:
    def run(world: ax.World) -> tuple[int, int]:
        model = ax.FSDP(net().bfloat16(), world=world)
        if accumulated is not None:
            model.accumulate_in(accumulated)
        model(inputs(world.rank, 2).bfloat16()).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return model.memory_estimate().gradient_bytes, nbytes(gradients)

    for estimated, measured in ax.World.mock(2).run(run):
        assert estimated == measured


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)


def test_unknown_optimizer_states_are_not_estimated() -> None:
    def run(world: ax.World) -> None:
        with pytest.raises(
            ValueError, match="optimizer=lamb: no such optimizer; use adafactor, adam, adamw"
        ):
            ax.FSDP(net()).memory_estimate("lamb")

    ax.World.mock(1).run(run)


def test_fsdp_group_is_positional() -> None:
    def run(world: ax.World) -> tuple[list[int], float]:
        group = [world.new_group([0, 1]), world.new_group([2, 3])][world.rank // 2]
        model = ax.FSDP(net(), group)
        model(inputs(world.rank, 4)).square().mean().backward()
        return model.mesh.mesh.tolist(), float(model.clip_grad_norm(1.0))

    results = ax.World.mock(4).run(run)
    assert [ranks for ranks, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert results[0][1] == results[1][1] != results[2][1]


def test_fsdp_refuses_world_with_group_and_replicas_in_subgroup() -> None:
    def run(world: ax.World) -> None:
        with pytest.raises(ValueError, match="pass only one"):
            ax.FSDP(net(), world.default_group, world=world)
        group = world.new_group([0, 1]), world.new_group([2, 3])
        with pytest.raises(ValueError, match=r"2 replicas over ranks \[., .\], a part of the"):
            ax.FSDP(net(), group[world.rank // 2], sharding="no_shard")

    ax.World.mock(4).run(run)


def test_groups_of_replicas_wait_as_long_as_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    make = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        limits.append(options["timeout"])
        return make(ranks, **options)

    monkeypatch.setattr(dist, "new_group", new_group)

    def run(world: ax.World) -> None:
        world.timeout_s = 77.0
        ax.FSDP(nn.Linear(4, 4), world=world, sharding="hybrid_shard", replicate=2)

    ax.World.mock(4).run(run)
    assert set(limits) == {timedelta(seconds=77)}
