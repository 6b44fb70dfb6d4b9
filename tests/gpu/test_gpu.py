"""Checks of a few seconds that need a GPU; ``scripts/gpu`` has the ones that take minutes.

A step that makes the host wait raises, losses equal a CPU's, staged memory is page-locked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn.attention import SDPBackend

from axonlaunch.checkpoint.saving.staging import HostCopies
from axonlaunch.comm import World
from axonlaunch.diagnostics.block_times import BlockTimes
from axonlaunch.diagnostics.doctor.gpus import link_report
from axonlaunch.engines.data_parallel.arriving_gradients import UpdateOnArrival
from axonlaunch.models.build import spec_for
from axonlaunch.training.ending.stop_vote import StopVote
from axonlaunch.training.measuring.device_use import DeviceUse
from axonlaunch.training.process.arithmetic import attention_kernels

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

# torch's warning about the mode that raises if the host waits.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

LLAMA = ["model=llama_debug", "data=synthetic_tokens", "data.sequence_length=64"]
STEPS = 6
"""Steps of training with offload."""
LAYOUTS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp"],
    "zero1": ["strategy=zero1"],
    "fsdp": ["strategy=fsdp"],
    "recomputed": ["strategy=fsdp", "train.activation_checkpointing=selective"],
    "inputs offloaded": ["strategy=fsdp", "train.activation_checkpointing=offload"],
    "updated in backward": [
        *("strategy=fsdp", "train.optimizer_in_backward=true", "train.grad_clip=null")
    ],
}


@pytest.fixture
def world() -> Iterator[World]:
    with World.init(backend="nccl") as world:
        yield world


def losses(world: World, *overrides: str, steps: int = 3, may_wait: bool = False) -> list[float]:
    """Train some steps; from the third on, operations that make the host wait raise, unless
    allowed.
    """
    chosen = run_config([*LLAMA, "train.global_batch_size=8", "launch.nproc=1", *overrides])
    engine, loader = rank_engine(chosen, world)
    step_losses = []
    try:
        for step in range(steps):
            batch = loader.batch(step)
            if world.device.type == "cuda":
                batch = batch.pin_memory()
                strict = step > 1 and not may_wait
                torch.cuda.set_sync_debug_mode("error" if strict else "default")
            step_losses.append(engine.train_step(batch).loss)
    finally:
        if world.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [float(loss) for loss in step_losses]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_does_not_make_the_host_wait(world: World, layout: str) -> None:
    assert len(losses(world, *LAYOUTS[layout], "train.precision=bf16")) == 3


@pytest.mark.parametrize("model", ["llama_debug", "gpt"])
def test_in_fp32_losses_are_those_of_a_cpu(world: World, model: str) -> None:
    overrides = [f"model={model}", "strategy=single"]
    here = losses(world, *overrides)
    on_cpu = World.mock(1).run(lambda cpu: losses(cpu, *overrides))[0]
    assert here == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.parametrize("offload", ["params", "optimizer_states", "full"])
def test_offloaded_training_equals_cpu(world: World, offload: str) -> None:
    check_offloaded(world, [f"strategy.fsdp.cpu_offload={offload}"])


def test_training_with_updates_on_arrival_equals_cpu(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, units = UpdateOnArrival._begin, []

    def begin_update(update: UpdateOnArrival, copied: Any, parameters: Sequence[Tensor]) -> None:
        units.append(parameters)
        begin(update, copied, parameters)

    monkeypatch.setattr(UpdateOnArrival, "_begin", begin_update)
    on_arrival = ["strategy.fsdp.cpu_offload=full", "train.optimizer_in_backward=true"]
    check_offloaded(world, on_arrival, "train.grad_clip=null")
    assert len(units) > STEPS, "gradients did not arrive by themselves"


def check_offloaded(world: World, offload: Sequence[str], *overrides: str) -> None:
    """Fail if losses with offload differ from those of one process on a CPU.

    Args:
        world: World with a GPU.
        offload: Settings of the offload.
        overrides: Settings of both runs.
    """
    common = ("optimizer.lr=0.01", *overrides)
    here = losses(world, "strategy=fsdp", *offload, *common, steps=STEPS, may_wait=True)
    [on_cpu] = World.mock(1).run(lambda cpu: losses(cpu, "strategy=single", *common, steps=STEPS))
    assert here == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.usefixtures("world")
def test_a_state_is_staged_in_page_locked_memory() -> None:
    copies, weight = HostCopies(), torch.arange(5.0, device="cuda")
    first = copies.copy({"model": {"a": weight}})["model"]["a"]
    assert first.is_pinned()
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    second = copies.copy({"model": {"a": weight + 1}})["model"]["a"]
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_ranks_stop_one_step_after_a_request_to_one_rank(world: World) -> None:
    vote, answers = StopVote(world), []
    for step in range(3):
        vote.cast(stop=step == 0)
        answers.append(vote.anyone())
    assert answers == [False, True, False]


def test_events_around_blocks_say_for_how_much_of_a_step_they_compute(world: World) -> None:
    chosen = run_config([*LLAMA, "train.global_batch_size=8", "launch.nproc=1", "strategy=fsdp"])
    engine, loader = rank_engine(chosen, world)
    [model] = engine.modules
    times = BlockTimes(spec_for(chosen).blocks(model).values())
    for step in range(3):  # the second is measured, and ends when the third begins
        times.note("reading")
        batch = loader.batch(step)
        times.note("stepping")
        engine.train_step(batch)
    torch.cuda.synchronize()
    read, computed, rest, _ = times.seconds_by_kind()
    assert computed > 0
    assert rest > 0
    assert 0 <= read < computed + rest


def test_copies_to_the_gpu_and_back_are_timed() -> None:
    links = link_report()["links"][:2]
    assert [(link["source"], link["target"]) for link in links] == [
        ("host", "cuda:0"),
        ("cuda:0", "host"),
    ]
    assert all(link["gb_s"] > 1 for link in links)


def test_the_allocators_counters_are_read(world: World) -> None:
    read = DeviceUse(world.device).read(step_s=1.0)
    assert read["reserved_bytes"] >= read["active_bytes"] >= 0
    assert read["alloc_retries"] == 0


def test_cudnn_attends_on_hopper(world: World) -> None:
    if torch.cuda.get_device_capability(world.device)[0] != 9:
        pytest.skip("this GPU is no Hopper")
    heads = torch.ones(1, 2, 128, 64, device=world.device, dtype=torch.bfloat16)
    with attention_kernels(run_config([]).train, world.device):
        chosen = torch._fused_sdp_choice(heads, heads, heads, is_causal=True)
    assert chosen == SDPBackend.CUDNN_ATTENTION.value
