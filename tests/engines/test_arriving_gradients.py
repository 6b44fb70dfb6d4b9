"""Norms and updates of gradients as they arrive on the host equal those after backward."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from axonlaunch.comm import World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.engines.data_parallel.arriving_gradients import (
    HostNorms,
    UpdateOnArrival,
    host_norms_of,
)
from axonlaunch.engines.data_parallel.fsdp import FSDP
from axonlaunch.engines.optimizer.clipping import gradient_norm
from axonlaunch.models.tensors.dtensor_regions import full_tensor

GPT = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=128"),
    *("data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=4"),
]
FULL = ["strategy.fsdp.cpu_offload=full"]
OFFLOADED = [*GPT, "strategy=fsdp", "launch.nproc=2", *FULL]
IN_BACKWARD, NO_CLIP = "train.optimizer_in_backward=true", "train.grad_clip=null"
GPU = torch.device("cuda", 0)


Trained = tuple[list[float], dict[str, Tensor]]


class Copied:
    """The event after the copies of a unit's gradients, which ends at once."""

    def synchronize(self) -> None:
        pass


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> list[FSDPParamGroup]:
    """Let gradients arrive as from a GPU; return the units in the order of their reduction."""
    reduce, reduced = FSDPParamGroup.post_backward, []

    def reduce_as_on_gpu(group: FSDPParamGroup, *unused: Any) -> None:
        reduce(group, *unused)
        reduced.append(group)
        for each in group.fsdp_params:
            if each.sharded_param.grad is not None:
                assert each.grad_offload_event is None  # torch still has the attribute
                each.grad_offload_event = Copied()  # type: ignore[assignment]

    monkeypatch.setattr(FSDPParamGroup, "post_backward", reduce_as_on_gpu)
    return reduced


@pytest.mark.usefixtures("arriving")
def test_norms_computed_in_backward_equal_those_after_it_to_the_bit() -> None:
    chosen = run_config(OFFLOADED)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        units = [unit for module in engine._parts.sharded for unit in module.units()]
        norms = HostNorms(units, device=world.device)
        trained = dict(engine.named_updated())
        for step in range(2):
            engine.backward(loader.batch(step))
            computed = norms.take()
            assert len(computed) == len(trained)
            expected = gradient_norm(trained.values())
            assert torch.equal(gradient_norm(trained.values(), computed=computed), expected)
            torch.testing.assert_close(expected, engine.gradient_norm())
            engine.update()

    World.mock(2).run(run)


def trained(overrides: list[str]) -> list[Trained]:
    """Return the losses and the parameters of every rank."""
    chosen = run_config([*overrides, "train.grad_clip=null", "scheduler.warmup_steps=2"])

    def run(world: World) -> Trained:
        engine, loader = rank_engine(chosen, world)
        losses = [float(engine.train_step(loader.batch(step)).loss) for step in range(3)]
        return losses, {n: full_tensor(p).clone() for n, p in engine.named_parameters()}

    return World.mock(2).run(run)


@pytest.mark.usefixtures("arriving")
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.precision=bf16", "train.param_dtype=bf16", "optimizer.master_weights=fp32"],
        ["optimizer.state_dtype=bf16"],
    ],
    ids=["fp32", "masters", "rounded states"],
)
def test_updates_of_arriving_gradients_equal_those_after_backward_to_the_bit(
    overrides: list[str],
) -> None:
    expected = trained([*OFFLOADED, *overrides])
    for (losses, state), (expected_losses, expected_state) in zip(
        trained([*OFFLOADED, *overrides, IN_BACKWARD]), expected, strict=True
    ):
        assert losses == expected_losses
        assert [n for n, value in state.items() if not torch.equal(value, expected_state[n])] == []


def test_a_unit_is_updated_after_its_copies_and_while_backward_goes_on(
    arriving: list[FSDPParamGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = run_config([*GPT, "strategy=fsdp", "launch.nproc=1", *FULL, IN_BACKWARD, NO_CLIP])
    updated = threading.Event()
    events: list[str] = []
    call_update, reduce = UpdateOnArrival._update_one, FSDPParamGroup.post_backward

    def update(self: UpdateOnArrival, *arguments: Any) -> None:
        events.append("updated")
        call_update(self, *arguments)
        updated.set()

    def reduce_after_first_update(group: FSDPParamGroup, *unused: Any) -> None:
        assert not arriving or updated.wait(60), "the first unit waits for the end of backward"
        reduce(group, *unused)

    monkeypatch.setattr(UpdateOnArrival, "_update_one", update)
    monkeypatch.setattr(Copied, "synchronize", lambda copied: events.append("copied"))
    monkeypatch.setattr(FSDPParamGroup, "post_backward", reduce_after_first_update)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.backward(loader.batch(0))
        assert len(arriving) > 2
        assert events[:2] == ["copied", "updated"]
        engine.update()
        assert events.count("updated") == len(dict(engine.named_updated()))

    World.mock(1).run(run)


@pytest.mark.usefixtures("arriving")
def test_finish_waits_for_updates_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = run_config([*GPT, "strategy=fsdp", "launch.nproc=1", *FULL, IN_BACKWARD, NO_CLIP])
    copy_ends = threading.Event()

    def wait(copied: Copied) -> None:
        if threading.current_thread().name.startswith("axonlaunch-host"):  # not backward itself
            assert copy_ends.wait(60)

    monkeypatch.setattr(Copied, "synchronize", wait)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.backward(loader.batch(0))
        threading.Timer(0.2, copy_ends.set).start()
        engine._parts.update.finish()
        assert [n for n, p in engine.named_updated() if p.grad is not None] == []

    World.mock(1).run(run)


def test_a_thread_waits_for_events_on_its_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    norms = HostNorms([], device=torch.device("cuda", 3))
    norms._begin(Copied(), [])
    norms._worker.submit(lambda: None).result(60)
    assert used == [3]


def begun(copied: object, gradient: Tensor) -> tuple[HostNorms, nn.Parameter]:
    norms, parameter = (
        HostNorms([], device=torch.device("cpu")),
        nn.Parameter(torch.zeros_like(gradient)),
    )
    parameter.grad = gradient
    norms._begin(copied, [parameter])
    return norms, parameter


def test_norm_is_computed_after_the_copy() -> None:
    gradient, copy_ends = torch.zeros(5000), threading.Event()

    def copy() -> None:
        assert copy_ends.wait(60)
        gradient.data.fill_(2.0)  # a copy by a GPU is no change that torch counts

    norms, parameter = begun(SimpleNamespace(synchronize=copy), gradient)
    copy_ends.set()
    assert float(norms.take()[parameter]) == pytest.approx(2 * 5000**0.5)
    assert norms.take() == {}


def test_gradient_that_changed_after_its_arrival_has_no_known_norm() -> None:
    copied = SimpleNamespace(synchronize=lambda: None)
    norms, parameter = begun(copied, torch.ones(8))
    assert parameter.grad is not None
    parameter.grad.mul_(2)
    assert norms.take() == {}
    norms, parameter = begun(copied, torch.ones(8))
    parameter.grad = torch.ones(8)
    assert norms.take() == {}


@pytest.mark.parametrize(
    ("overrides", "device", "is_used"),
    [
        ([], GPU, True),
        (["strategy.fsdp.cpu_offload=params"], GPU, True),
        ([], torch.device("cpu"), False),
        (["strategy.fsdp.cpu_offload=optimizer_states"], GPU, False),
        (["train.grad_clip=null"], GPU, False),
        (["train.micro_batch_size=1"], GPU, False),
    ],
    ids=["full", "params", "on a CPU", "gradients on the GPU", "no clipping", "micro-batches"],
)
def test_norms_are_computed_in_backward_where_gradients_arrive(
    overrides: list[str], device: torch.device, is_used: bool
) -> None:
    chosen = run_config([*OFFLOADED, "train.grad_clip=1.0", *overrides])

    def run(world: World) -> bool:
        model = FSDP(nn.Linear(4, 4), world=world, cpu_offload=chosen.strategy.fsdp.cpu_offload)
        return host_norms_of(chosen, Layout.of(chosen, world_size=2), [model], device) is not None

    assert World.mock(2).run(run) == [is_used] * 2
