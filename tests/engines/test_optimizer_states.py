"""States are allocated without a step, and training then equals plain torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gathered import Held, gathered, held
from support.optimizer_layouts import LAYOUTS
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from axonlaunch import config as configuration
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import resolved
from axonlaunch.config.optimization.optimizer import AdamWConfig, OptimizerConfig, SGDConfig
from axonlaunch.config.optimization.parameter_groups import states_of
from axonlaunch.engines.data_parallel.zero1 import ShardedUpdate
from axonlaunch.engines.optimizer.offload import StreamedUpdate
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.models.build import build_model as build_model
from axonlaunch.models.tensors.dtensor_regions import full_tensor

CPU = torch.device("cpu")
CONFIGS = {
    "adamw": AdamWConfig(lr=0.1, weight_decay=0.1),
    "sgd": SGDConfig(lr=0.1, weight_decay=0.3),
    "nesterov": SGDConfig(lr=0.1, weight_decay=0.3, nesterov=True),
    "sgd without momentum": SGDConfig(lr=0.1, weight_decay=0.3, momentum=0.0),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def updates(kind: str, config: OptimizerConfig, world: World) -> Update:
    """Return the update of a layout, over the tensors that it would hold."""
    model = net()
    mesh = world.mesh(dp_replicate=world.world_size).device_mesh
    if kind in ("sharded", "streamed shards"):
        fully_shard(model, mesh=mesh["dp_replicate"])
    weights = dict(model.named_parameters())
    if kind == "zero1":
        return ShardedUpdate(config, weights, mesh=mesh)
    if kind.startswith("streamed"):
        return StreamedUpdate(config, weights, device=CPU, states_on=CPU)
    return Update(config, weights)


def about(states: dict[str, Tensor]) -> dict[str, Any]:
    def of(tensor: Tensor) -> Any:
        spec = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        both = [(t.shape, t.stride(), t.dtype, t.device) for t in (tensor, local)]
        return both, spec, tensor.requires_grad

    return {name: of(tensor) for name, tensor in states.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["whole", "zero1", "sharded", "streamed", "streamed shards"])
def test_preallocated_states_equal_torch_states_of_first_step(name: str, kind: str) -> None:
    def run(world: World) -> None:
        fresh, stepped = (updates(kind, CONFIGS[name], world) for _ in range(2))
        for tensor in stepped.tensors.values():
            tensor.grad = torch.ones_like(tensor)
        for optimizer in stepped.optimizers:
            assert not optimizer.state
        stepped.apply(rate=lambda _: 0.0)
        assert about(fresh.state_dict()) == about(stepped.state_dict())
        assert all(not full_tensor(t).any() for t in fresh.state_dict().values())

    World.mock(2).run(run)


@pytest.mark.parametrize("name", CONFIGS)
def test_state_table_equals_torch_optimizer_states(name: str) -> None:
    config, weight = CONFIGS[name], nn.Parameter(torch.randn(5, 4))
    weight.grad = torch.randn(5, 4)
    update = Update(config, {"weight": weight})
    [optimizer] = update.optimizers
    optimizer.step()
    states, expected = optimizer.state.get(weight, {}), states_of(config, (5, 4))
    assert states.keys() == expected.keys()
    for key, state in expected.items():
        assert states[key].shape == state.shape((5, 4))
        assert states[key].dtype == torch.float32


def test_preallocated_momentum_excludes_weight_decay() -> None:
    update = Update(CONFIGS["sgd"], dict(net().named_parameters()))
    assert not any(state.any() for state in update.state_dict().values())


def test_reading_states_keeps_gradients_and_learning_rates() -> None:
    weights = dict(net().named_parameters())
    gradients = {name: torch.randn_like(p) for name, p in weights.items()}
    for name, p in weights.items():
        p.grad = gradients[name]
    initial = {name: p.detach().clone() for name, p in weights.items()}
    update = Update(CONFIGS["adamw"], weights)
    update.state_dict()
    assert all(weights[name].grad is gradient for name, gradient in gradients.items())
    assert all(torch.equal(p, initial[name]) for name, p in weights.items())
    assert {g["lr"] for o in update.optimizers for g in o.param_groups} == {0.1}


@pytest.mark.parametrize("name", CONFIGS)
def test_reading_states_at_any_time_keeps_torch_optim_results(name: str) -> None:
    config = CONFIGS[name]
    ours, reference = net(), net()
    matrices = {"params": [p for p in reference.parameters() if p.ndim == 2], "weight_decay": 0.3}
    vectors = {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0}
    plain: torch.optim.Optimizer
    if isinstance(config, AdamWConfig):
        matrices["weight_decay"] = 0.1
        plain = torch.optim.AdamW([matrices, vectors], lr=0.1, betas=config.betas, fused=True)
    else:
        plain = torch.optim.SGD(
            [matrices, vectors],
            lr=0.1,
            momentum=config.momentum,
            nesterov=config.nesterov,
            fused=True,
        )
    update = Update(config, dict(ours.named_parameters()))
    for step in range(4):
        update.load_state_dict({k: v.clone() for k, v in update.state_dict().items()})
        generator = torch.Generator().manual_seed(step)
        for parameter, other in zip(ours.parameters(), reference.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad.clone()
        update.apply(rate=lambda _: 0.1)
        plain.step()
        for parameter, other in zip(ours.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter, other)


SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"),
    *("train.grad_clip=null", "scheduler=constant", "scheduler.warmup_steps=0"),
]
SGD = {
    "momentum": "optimizer=sgd optimizer.weight_decay=0.3",
    "no momentum": "optimizer=sgd optimizer.weight_decay=0.3 optimizer.momentum=0",
}
STEPS = 3


def as_a_command_does(overrides: list[str]) -> RunConfig:
    return resolved(configuration.load([*SMALL, *overrides]), accelerators=0)


def plain_sgd(overrides: list[str]) -> dict[str, Tensor]:
    """Train by hand, on one process and all samples, with torch's SGD."""
    chosen = as_a_command_does([*overrides, "strategy=single", "launch.nproc=1"])
    assert isinstance(chosen.optimizer, SGDConfig)
    model = build_model(chosen.model, seed=chosen.seed)
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ],
        lr=chosen.optimizer.lr,
        momentum=chosen.optimizer.momentum,
    )
    _, loader = World.mock(1).run(lambda world: rank_engine(chosen, world))[0]
    for step in range(STEPS):
        batch = loader.batch(step)
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("momentum", SGD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_states_before_first_step_equals_torch_sgd(layout: str, momentum: str) -> None:
    """This is the case in every run with ``model.weights=``, and in runs that save before the first
    step.
    """
    ranks, strategy = LAYOUTS[layout]
    overrides = SGD[momentum].split()
    chosen = as_a_command_does([*overrides, *strategy.split(), f"launch.nproc={ranks}"])

    def run(world: World) -> dict[str, Held]:
        engine, loader = rank_engine(chosen, world)
        engine.load_state_dict(engine.state_dict())
        for step in range(STEPS):
            engine.train_step(loader.batch(step))
        return held(engine.named_parameters())

    expected, trained = plain_sgd(overrides), gathered(World.mock(ranks).run(run))
    assert trained.keys() == expected.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6)
