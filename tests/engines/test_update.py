"""Schedules, loss scaling, sharded and streamed updates, each compared with its definition."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.configured import run_config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from axonlaunch.comm import World
from axonlaunch.config.optimization.optimizer import (
    AdamConfig,
    AdamWConfig,
    CustomOptimizerConfig,
    LionConfig,
    NAdamConfig,
    OptimizerConfig,
    SGDConfig,
)
from axonlaunch.config.optimization.schedules import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    SchedulerConfig,
    WSDConfig,
)
from axonlaunch.engines.data_parallel import zero1
from axonlaunch.engines.data_parallel.zero1 import ShardedUpdate
from axonlaunch.engines.optimizer.clipping import gradient_norm
from axonlaunch.engines.optimizer.offload import HOST, StreamedUpdate
from axonlaunch.engines.optimizer.schedules import learning_rate
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.engines.precision.policy import LossScale


def rates(schedule: SchedulerConfig, steps: int) -> list[float]:
    return [learning_rate(schedule, peak=2.0, step=step, steps=steps) for step in range(steps)]


def test_every_schedule_warms_up_linearly_to_its_peak() -> None:
    for schedule in (ConstantConfig, CosineConfig, LinearConfig, WSDConfig):
        assert rates(schedule(warmup_steps=4), 40)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_constant_schedule_keeps_rate() -> None:
    assert rates(ConstantConfig(warmup_steps=0), 5) == [2.0] * 5


def test_cosine_is_half_a_cosine_to_its_final_ratio() -> None:
    got = rates(CosineConfig(warmup_steps=0, final_lr_ratio=0.1), 11)
    expected = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 10)) / 2) for step in range(11)]
    assert got == pytest.approx(expected)


def test_linear_falls_evenly_to_its_final_ratio() -> None:
    got = rates(LinearConfig(warmup_steps=1, final_lr_ratio=0.5), 12)
    assert got[1] == pytest.approx(2.0)
    assert got[-1] == pytest.approx(1.0)
    falls = {round(a - b, 9) for a, b in pairwise(got[1:])}
    assert falls == {0.1}


def test_wsd_is_stable_until_its_decay() -> None:
    got = rates(WSDConfig(warmup_steps=2, decay_steps=4, final_lr_ratio=0.0), 12)
    assert got[2:8] == [2.0] * 6
    assert got[8:] == pytest.approx([1.5, 1.0, 0.5, 0.0])


def test_warm_up_is_a_fifteenth_of_the_run_unless_set() -> None:
    assert CosineConfig().warmup(300) == 20
    assert CosineConfig(warmup_steps=7).warmup(300) == 7


def test_the_loss_scale_halves_on_overflow_and_doubles_after_its_interval() -> None:
    scale = LossScale(torch.device("cpu"), value=8.0, growth_interval=3)
    scale.update(torch.tensor(True))
    assert scale.value == 4.0
    for _ in range(3):
        scale.update(torch.tensor(False))
    assert scale.value == 8.0
    assert scale.good_steps == 0


STEPS = 4


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (7, 3), "vector": (5,), "small": (1, 4), "even": (4, 6), "scalar": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters().items()}


def updated(update: Update, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            own[name].grad = gradient
        update.collect_gradients()
        update.clip_gradients(1.0)
        update.apply(rate=lambda _, step=step: 0.1 / (step + 1))  # type: ignore[misc]
    assert all(p.grad is None for p in own.values())
    return {name: p.detach().clone() for name, p in own.items()}


@pytest.mark.parametrize("config", [AdamWConfig(lr=0.1), SGDConfig(lr=0.1, weight_decay=0.1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("straight", [False, True])
def test_sharded_update_equals_unsharded_update(
    config: AdamWConfig | SGDConfig, ranks: int, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if straight:
        monkeypatch.setattr(zero1, "_LARGE", 0)
    own = parameters()
    expected = updated(Update(config, own), own)

    def run(world: World) -> tuple[dict[str, Tensor], int]:
        own = parameters()
        mesh = world.mesh(dp_replicate=ranks).device_mesh
        update = ShardedUpdate(config, own, mesh=mesh)
        result = updated(update, own)
        states = update.state_dict().values()
        local = sum(t.to_local().numel() for t in states if isinstance(t, DTensor))
        return result, local

    results = World.mock(ranks).run(run)
    for result, _ in results:
        for name, tensor in expected.items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)
    moments = 2 if isinstance(config, AdamWConfig) else 1
    full = moments * sum(p.numel() for p in own.values() if p.ndim)
    replicated = moments * ranks  # the scalar can't be divided
    assert sum(local for _, local in results) == full + replicated


def update_in_shards(world: World) -> None:
    """Update parameters whose rows are divided between two ranks."""
    own = parameters()
    mesh = world.mesh(dp_replicate=2).device_mesh
    updated(ShardedUpdate(SGDConfig(lr=0.1), own, mesh=mesh), own)


def test_a_sharded_update_gathers_small_parameters_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather, sizes = zero1.all_gather_single, []

    def counted(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(output.numel())
        return gather(output, *args, **kwargs)

    monkeypatch.setattr(zero1, "all_gather_single", counted)
    World.mock(2).run(update_in_shards)
    rows = 2 * (4 * 3 + 3 + 4 + 2 * 6)  # the last rank's are padded
    assert sizes == [rows] * 2 * STEPS


def test_large_parameter_rows_are_gathered_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zero1, "_LARGE", 0)
    gather, is_in_place = zero1.all_gather_single, []

    def seen(output: Tensor, mine: Tensor, **kwargs: Any) -> Any:
        is_in_place.append(output.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr())
        return gather(output, mine, **kwargs)

    monkeypatch.setattr(zero1, "all_gather_single", seen)
    World.mock(2).run(update_in_shards)
    # The rows of one of the 4 parameters are divided by these ranks; the others share a message.
    assert is_in_place.count(True) == 2 * STEPS
    assert len(is_in_place) == 2 * 2 * STEPS


@pytest.mark.parametrize("config", [AdamWConfig(lr=0.1), SGDConfig(lr=0.1, weight_decay=0.1)])
def test_streamed_update_equals_unsharded_update(config: AdamWConfig | SGDConfig) -> None:
    cpu = torch.device("cpu")
    own, streamed = parameters(), parameters()
    expected = updated(Update(config, own), own)
    update = StreamedUpdate(config, streamed, device=cpu, states_on=cpu)
    for name, tensor in updated(update, streamed).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_streamed_update_keeps_states_on_configured_device() -> None:
    """The meta device, which holds no data, replaces the GPU."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    own = {name: nn.Parameter(p.to(meta)) for name, p in parameters().items()}
    update = StreamedUpdate(LionConfig(), own, device=meta, states_on=meta)
    for p in own.values():
        p.grad = torch.zeros_like(p)
    update.apply(rate=lambda _: 0.1)
    assert {state.device for state in update.state_dict().values()} == {meta}
    on_host = parameters()
    update = StreamedUpdate(LionConfig(), on_host, device=cpu, states_on=cpu)
    for p in on_host.values():
        p.grad = torch.zeros_like(p)
    update.apply(rate=lambda _: 0.1)
    assert {state.device for state in update.state_dict().values()} == {cpu}


def test_reading_states_before_first_step_changes_nothing() -> None:
    own, asked = parameters(), parameters()
    expected = updated(Update(AdamWConfig(), own), own)
    update = Update(AdamWConfig(), asked)
    states = update.state_dict()
    assert {float(value) for key, value in states.items() if key.endswith(".step")} == {0.0}
    for name, tensor in updated(update, asked).items():
        assert torch.equal(tensor, expected[name])


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    from axonlaunch.config import RunConfig
    from axonlaunch.data.datasets.dataset import Batch
    from axonlaunch.engines.build import build_engine

    overrides = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    overrides += ["train.precision=fp16", "strategy=fsdp", "launch.nproc=2"]
    chosen: RunConfig = run_config(["data=synthetic_tokens", *overrides])

    def run(world: World) -> tuple[bool, bool, bool]:
        engine = build_engine(chosen, world)
        tokens = torch.zeros(16, 8, dtype=torch.int64)
        before = {n: p.to_local().clone() for n, p in engine.state_dict()["model"].items()}
        if world.rank == 1:
            with torch.no_grad():
                for _, parameter in engine.named_parameters():
                    parameter.register_hook(lambda gradient: gradient * float("inf"))
        result = engine.train_step(Batch(tokens, tokens))
        after = {n: p.to_local() for n, p in engine.state_dict()["model"].items()}
        same = all(torch.equal(before[name], after[name]) for name in before)
        scale = float(engine.state_dict()["counters"]["loss_scale"])
        return bool(result.skipped), same, scale == 32768.0

    assert World.mock(2).run(run) == [(True, True, True)] * 2


@pytest.mark.parametrize(
    "config",
    [
        SGDConfig(lr=0.1, momentum=0.9, weight_decay=0.1),
        AdamWConfig(lr=0.1, weight_decay=0.1),
        NAdamConfig(lr=0.1),  # is not fused, so the host waits
        CustomOptimizerConfig(
            target="torch.optim:SGD", lr=0.1, arguments={"momentum": 0.9, "fused": True}
        ),
    ],
    ids=lambda config: str(config.name),
)
def test_skipped_step_changes_no_state(config: OptimizerConfig) -> None:
    """In a skipped first step, torch's fused SGD would create an uninitialized momentum."""
    own, plain = parameters(), parameters()
    update, right = Update(config, own), Update(config, plain)
    for step, overflows in enumerate((1.0, 0.0, 1.0, 0.0)):
        for name, gradient in gradients(step).items():
            own[name].grad = gradient * (math.inf if overflows else 1)
            plain[name].grad = None if overflows else gradient
        update.apply(rate=lambda _: 0.1, skip=torch.tensor(overflows))
        if not overflows:
            right.apply(rate=lambda _: 0.1)
    for name in own:
        assert torch.equal(own[name], plain[name])
    expected = right.state_dict()
    for key, state in update.state_dict().items():
        assert torch.equal(state, expected[key]), key


@pytest.mark.parametrize("state_dtype", ["parameter", "bf16", "8bit"])
@pytest.mark.parametrize("optimizer", [AdamWConfig, SGDConfig])
def test_skipped_step_changes_no_master_and_no_converted_state(
    optimizer: Any, state_dtype: str
) -> None:
    weights = {"w": nn.Parameter(torch.randn(64, 64).to(torch.float16))}
    update = Update(optimizer(master_weights="fp32", state_dtype=state_dtype), weights)
    kept: dict[str, Tensor] = {}
    for step, overflows in enumerate((1.0, 0.0, 0.0, 1.0, 1.0), start=1):
        weights["w"].grad = torch.randn(64, 64).half() * (math.inf if overflows else 1)
        update.apply(rate=lambda peak: peak, step=step, skip=torch.tensor(overflows))
        state = {**update.state_dict(), **update.masters(), "rounded": weights["w"].detach()}
        if overflows and kept:
            assert [key for key in state if not torch.equal(state[key], kept[key])] == []
        kept = {key: value.clone() for key, value in state.items()}
    assert torch.equal(kept["rounded"], kept["w"].half())


def test_a_stage_without_parameters_has_nothing_to_update() -> None:
    update = Update(AdamWConfig(), {})
    assert update.state_dict() == {}
    assert float(update.clip_gradients(1.0)) == 0
    update.apply(rate=lambda _: 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_norm_of_large_tensor_equals_float64(dtype: torch.dtype) -> None:
    """One ``vector_norm`` over all of these elements is off by 6e-4 in fp32 on a CPU."""
    large = nn.Parameter(torch.zeros(2**24 + 5, dtype=dtype))
    small = nn.Parameter(torch.zeros(3, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    for parameter in (large, small):
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    squares = [p.grad.double().square().sum() for p in (large, small) if p.grad is not None]
    norm = gradient_norm([large, small])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), sum(squares).sqrt(), rtol=1e-6, atol=0)


class UnscaledStep(torch.optim.SGD):
    """A fused optimizer with a step of its own, which applies no ``grad_scale``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)


UNSCALED = CustomOptimizerConfig(target=f"{__name__}:UnscaledStep", arguments={"fused": True})
FUSED_ADAGRAD = CustomOptimizerConfig(target="torch.optim:Adagrad", arguments={"fused": True})


@pytest.mark.parametrize("max_norm", [0.5, 1e9, None], ids=str)
@pytest.mark.parametrize(
    ("config", "is_streamed", "num_passes"),
    [
        (AdamWConfig(), False, 0),
        (AdamConfig(), True, 0),
        (SGDConfig(), False, 0),
        (FUSED_ADAGRAD, False, 0),
        (UNSCALED, False, 1),
        (LionConfig(), True, 0),
        (LionConfig(), False, 1),
    ],
)
def test_loss_scale_is_removed_while_clipping_in_one_pass_or_in_the_update(
    config: Any,
    is_streamed: bool,
    num_passes: int,
    max_norm: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is ``torch.amp``: unscaled, then clipped."""
    own, plain = parameters(), parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    scaler.scale(torch.zeros(()))  # starts with the first loss
    for name, gradient in gradients(0).items():
        own[name].grad, plain[name].grad = gradient * 2.0**13, gradient * 2.0**13
    scaler.unscale_(torch.optim.SGD(plain.values()))
    limit = math.inf if max_norm is None else max_norm
    expected = nn.utils.clip_grad_norm_(plain.values(), limit)
    reference, update = Update(config, plain), Update(config, own)
    if is_streamed:
        update = StreamedUpdate(config, own, device=HOST, states_on=HOST)
    passes: list[int] = []
    multiply = torch._foreach_mul_
    monkeypatch.setattr(
        torch, "_foreach_mul_", lambda *args: (passes.append(1), multiply(*args))[1]
    )
    norm = update.clip_gradients(max_norm, loss_scale=torch.tensor(scaler.get_scale()))
    assert len(passes) == num_passes
    torch.testing.assert_close(norm, expected)
    monkeypatch.undo()
    for _ in range(2):
        for each in (update, reference):
            each.apply(rate=lambda _: 0.1)
        for name, parameter in own.items():
            torch.testing.assert_close(parameter, plain[name], rtol=1e-6, atol=1e-6)
            parameter.grad, plain[name].grad = (gradients(1)[name] for _ in range(2))
