"""Third-party optimizers by target or by name, tried on small parameters first."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.configured import estimate_config, run_config
from support.gathered import Held, gathered, held
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.optim import Optimizer

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import ConfigError
from axonlaunch.config.optimization.optimizer import CustomOptimizerConfig
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.planning.memory import estimate as memory_estimate


class Tempered(Optimizer):
    """Momentum that starts at one, divided by a count that is a Python number."""

    def __init__(
        self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["count"], state["average"] = 0, torch.ones_like(p)
        state["count"] += 1
        state["average"].lerp_(p.grad, 1 - group["beta"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(state["average"], alpha=group["lr"] / state["count"])


class Normed(Tempered):
    """Its update of an element depends on all others."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Hoarder(Tempered):
    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["history"] = [1]


class Counter(Tempered):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Flat(Tempered):
    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["flat"] = torch.zeros(p.numel() // 2 + 1)


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somebodys")
    for kind in (Tempered, Normed, Hoarder, Counter, Flat):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "somebodys", module)


SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"),
    *("scheduler=constant", "scheduler.warmup_steps=0"),
]
CUSTOM = ["optimizer=custom", "optimizer.lr=0.01"]
TEMPERED = [*CUSTOM, "optimizer.target=somebodys:Tempered", "optimizer.arguments={weight_decay: 1}"]
LAYOUTS = {
    "zero1": (2, "strategy=zero1"),
    "fsdp": (3, "strategy=fsdp train.global_batch_size=9"),
    "parameters offloaded": (2, "strategy=fsdp strategy.fsdp.cpu_offload=params"),
    "fsdp x tensor": (4, "strategy=fsdp strategy.tensor.degree=2"),
    "pipeline": (2, "strategy=pipeline train.micro_batch_size=4"),
}


def run(
    overrides: list[str], ranks: int, *, prepare: Callable[[Any], None] = lambda engine: None
) -> dict[str, Tensor]:
    chosen = run_config([*SMALL, *overrides, f"launch.nproc={ranks}"])

    def on_rank(world: World) -> dict[str, Held]:
        engine, loader = rank_engine(chosen, world)
        prepare(engine)
        for step in range(3):
            engine.train_step(loader.batch(step))
        return held(engine.named_parameters())

    return gathered(World.mock(ranks).run(on_rank))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_by_target_equals_one_process_in_every_layout(layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    overrides = [*TEMPERED, *strategy.split()]
    size = [word for word in overrides if "global_batch" in word]
    expected = run([*TEMPERED, *size, "strategy=single"], 1)
    got = run(overrides, ranks)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_custom_optimizer_initializes_nonzero_states_itself() -> None:
    """Every run with ``model.weights=`` reads states before the first step; this one's do not start
    at zero.
    """
    expected = run([*TEMPERED, "strategy=fsdp"], 2)
    result = run(
        [*TEMPERED, "strategy=fsdp"],
        2,
        prepare=lambda engine: engine.load_state_dict(engine.state_dict()),
    )
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())


def test_skipped_fp16_steps_create_no_custom_states() -> None:
    """Before the first real step, checkpoints must not have states that the class didn't create."""
    overrides = [*TEMPERED, "strategy=fsdp", "train.precision=fp16"]

    def overflow(engine: Any) -> None:
        for _ in range(2):
            for _, tensor in engine.named_updated():
                tensor.grad = torch.full_like(tensor, torch.inf)
            _, skipped = engine.update()
            assert skipped

    def overflow_and_load(engine: Any) -> None:
        overflow(engine)
        engine.load_state_dict(engine.state_dict())

    expected = run(overrides, 2, prepare=overflow)
    loaded = run(overrides, 2, prepare=overflow_and_load)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_custom_states_including_numbers_are_saved_and_loaded() -> None:
    config = CustomOptimizerConfig(target="somebodys:Tempered", lr=0.1)
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 3), torch.randn(4, 4, 3)

    def stepped(update: Update, p: nn.Parameter, steps: Iterator[int]) -> None:
        for step in steps:
            p.grad = gradients[step]
            update.apply(rate=lambda peak: peak)

    straight = nn.Parameter(start.clone())
    first = Update(config, {"p": straight})
    stepped(first, straight, iter(range(2)))
    saved = {key: value.clone() for key, value in first.state_dict().items()}
    assert saved["p.count"] == 2
    resumed = nn.Parameter(straight.detach().clone())
    second = Update(config, {"p": resumed})
    second.load_state_dict(saved)
    for update, p in ((first, straight), (second, resumed)):
        stepped(update, p, iter(range(2, 4)))
    assert torch.equal(straight, resumed)
    assert second.optimizers[0].state[resumed]["count"] == 4


def test_a_parameter_that_had_no_gradient_resumes_without_states() -> None:
    """Its optimizer then initializes them, as in a run that was not interrupted."""
    config = CustomOptimizerConfig(target="somebodys:Tempered", lr=0.1)
    straight = {name: nn.Parameter(torch.ones(4, 3)) for name in ("used", "unused")}
    first = Update(config, straight)
    straight["used"].grad = torch.full((4, 3), 0.5)
    first.apply(rate=lambda peak: peak)
    saved = {key: value.clone() for key, value in first.state_dict().items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    second = Update(config, resumed)
    second.load_state_dict(saved)
    assert [*second.optimizers[0].state] == [resumed["used"]]
    again = {key: value.clone() for key, value in second.state_dict().items()}
    assert again.keys() == saved.keys()
    assert all(again[key].equal(value) or value.isnan().all() for key, value in saved.items())
    for update, parameters in ((first, straight), (second, resumed)):
        for p in parameters.values():
            p.grad = torch.full((4, 3), 0.25)
        update.apply(rate=lambda peak: peak)
    assert all(torch.equal(straight[name], p) for name, p in resumed.items())


def test_preallocated_custom_states_are_not_held_twice() -> None:
    """Measuring memory on a CPU reads the states before the first step, too."""
    parameter = nn.Parameter(torch.ones(4, 3))
    update = Update(CustomOptimizerConfig(target="somebodys:Tempered", lr=0.1), {"p": parameter})
    states = [weakref.ref(state) for state in update.state_dict().values()]
    parameter.grad = torch.ones(4, 3)
    update.apply(rate=lambda peak: peak)
    gc.collect()
    assert [reference() for reference in states] == [None, None]


@pytest.mark.slow
def test_estimate_counts_custom_optimizer_states() -> None:
    overrides = [*SMALL, *TEMPERED, "strategy=fsdp", "launch.nproc=2"]
    estimate = memory_estimate.estimate(estimate_config(overrides))
    chosen = run_config(overrides)

    def held(world: World) -> int:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        # A Python number is a tensor only in a checkpoint.
        states = [local_part(state) for state in engine.optimizer_states()]
        return sum(state.nbytes for state in states if state.ndim)

    assert estimate.ranks[0].breakdown["optimizer"] == World.mock(2).run(held)[0]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        run_config([*SMALL, "strategy=fsdp", "launch.nproc=2", *overrides])
    [problem] = raised.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "optimizer.target=somebodys:Normed",
            "optimizer.target=somebodys:Normed: it needs all elements of a parameter to update "
            "one of them, and fsdp leaves each rank a part; use strategy=single, ddp or pipeline",
        ),
        (
            "optimizer.target=somebodys:Hoarder",
            "optimizer.target=somebodys:Hoarder: keeps a state history that is a list; keep a",
        ),
        (
            "optimizer.target=somebodys:Counter",
            "optimizer.target=somebodys:Counter: keeps k in its groups of parameters, which a",
        ),
        (
            "optimizer.target=somebodys:Flat",
            "optimizer.target=somebodys:Flat: keeps a state flat of shape ",
        ),
        (
            "optimizer.target=somebodys:Nothing",
            "optimizer.target=somebodys:Nothing: module 'somebodys' has no attribute 'Nothing'",
        ),
        (
            "optimizer.target=somebodys:Tempered optimizer.arguments={beta:x}",
            "optimizer.target=somebodys:Tempered: trying it on a small parameter failed with "
            "TypeError: ",
        ),
        (
            "optimizer.target=somebodys:Tempered optimizer.groups={*.bias:{betta:1}}",
            "optimizer.groups.*.bias.betta=1: there is no option of a group 'betta'; did you mean "
            "beta? known: beta, lr, lr_scale, weight_decay",
        ),
        ("optimizer.target=somebodys", "optimizer.target=somebodys: is not of the form"),
    ],
)
def test_invalid_custom_optimizer_is_refused(overrides: str, message: str) -> None:
    assert refusal(*CUSTOM, *overrides.split()).startswith(message)


@dataclass(frozen=True)
class TemperedConfig:
    name: str = "tempered"
    lr: float = 0.01
    beta: float = 0.9
    weight_decay: float = 1.0


def test_a_registered_class_is_chosen_typed_and_grouped_by_its_dataclass() -> None:
    ax.register_optimizer("tempered", config=TemperedConfig)(Tempered)
    overrides = ["optimizer=tempered", "optimizer.groups={*.bias:{beta:0.5}}", "strategy=zero1"]
    expected = run([*TEMPERED, "optimizer.groups={*.bias:{beta:0.5}}", "strategy=single"], 1)
    got = run(overrides, 2)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert refusal("optimizer=tempered", "optimizer.betta=1").startswith(
        "optimizer.betta=1: there is no such key; did you mean optimizer.beta?"
    )


def test_a_registered_class_without_a_dataclass_takes_arguments() -> None:
    ax.register_optimizer("free")(Tempered)
    got = run(["optimizer=free", "optimizer.lr=0.01", "optimizer.arguments={weight_decay: 1}"], 1)
    expected = run([*TEMPERED, "strategy=single"], 1)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_optimizer_entry_with_wrong_states_is_refused() -> None:
    states = [ax.OptimizerState(name="exp_avg")]
    ax.register_optimizer("wrong", config=TemperedConfig, states=states)(Tempered)
    assert refusal("optimizer=wrong").startswith(
        "optimizer.name=wrong: it is registered with states exp_avg [2, 3], but has "
    )
    ax.register_optimizer("divided", config=TemperedConfig, sharding="elementwise")(Normed)
    assert refusal("optimizer=divided").startswith(
        "optimizer.name=divided: it is registered as elementwise, but updates halves"
    )


@pytest.mark.parametrize("fields", [["name"], ["lr"]])
def test_a_dataclass_without_a_name_or_a_rate_is_refused(fields: list[str]) -> None:
    config = dataclasses.make_dataclass("Config", fields, frozen=True)
    with pytest.raises(ValueError, match="not a frozen dataclass with the fields name and lr"):
        ax.register_optimizer("broken", config=config)
