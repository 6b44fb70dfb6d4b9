"""Cost of a schedule: idle time of ranks, and activations that stages hold."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.distributed import pipelining

from axonlaunch.comm import World
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.engines.pipeline.schedule import Action, PipelineSchedule
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats, timeline


@st.composite
def schedules(draw: st.DrawFn) -> PipelineSchedule:
    name = draw(st.sampled_from([*SCHEDULES]))
    rule = SCHEDULES[name]
    degree = draw(st.integers(2, 5))
    turns = rule.stages_per_rank if rule.fixed else draw(st.integers(1, 3))
    microbatches = draw(
        st.integers(2, 14).filter(
            lambda m: rule.fits(m, degree=degree, stages_per_rank=turns),
        )
        if any(rule.fits(m, degree=degree, stages_per_rank=turns) for m in range(2, 15))
        else st.nothing()
    )
    return PipelineSchedule(name, degree=degree, microbatches=microbatches, stages_per_rank=turns)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(schedules(), st.integers(1, 4), st.integers(1, 6))
def test_timeline_runs_each_action_once_in_valid_order(
    schedule: PipelineSchedule, forward: int, backward: int
) -> None:
    times = timeline(schedule, forward=forward, backward=backward)
    stages, microbatches = range(schedule.num_stages), range(schedule.microbatches)
    done = {slot.action: slot for slot in times.slots}
    assert len(done) == len(times.slots)
    for stage in stages:
        for microbatch in microbatches:
            kinds = "".join(
                kind
                for kind in "FBIW"
                if Action(kind, stage, microbatch) in done  # type: ignore[arg-type]
            )
            assert kinds in ("FB", "FIW")
    for slot in times.slots:
        action = slot.action
        assert schedule.rank_of_stage[action.stage] == slot.rank
        took = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}[action.kind]
        assert slot.stop - slot.start == took
        for needed in needs(action, schedule.num_stages):
            assert any(done[other].stop <= slot.start for other in needed if other in done), action
    for rank in range(schedule.degree):
        row = [slot for slot in times.slots if slot.rank == rank]
        assert [slot.action for slot in row] == list(schedule.actions[rank])
        assert all(earlier.stop <= after.start for earlier, after in pairwise(row))
    assert 0 <= times.bubble_fraction < 1


def needs(action: Action, num_stages: int) -> list[list[Action]]:
    """Return the prerequisites of an action, independently of the code under test."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [[Action("F", stage - 1, microbatch)]] if stage > 0 else []
    if action.kind == "W":
        return [[Action("I", stage, microbatch)], [Action("F", stage, microbatch)]]
    after = [Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)]
    return [[Action("F", stage, microbatch)], *([after] if stage + 1 < num_stages else [])]


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("backward", [1, 2, 3.5])
def test_pipeline_bubbles_equal_papers(degree: int, rounds: int, backward: float) -> None:
    microbatches = degree * rounds

    def bubble(name: str, stages_per_rank: int = 1) -> float:
        schedule = PipelineSchedule(
            name, degree=degree, microbatches=microbatches, stages_per_rank=stages_per_rank
        )
        return timeline(schedule, backward=backward).bubble_fraction

    p, m = degree, microbatches
    assert bubble("gpipe") == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert bubble("1f1b") == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    for v in (1, 2, 3):
        papers = (p - 1) / (v * m + p - 1)
        assert bubble("interleaved_1f1b", v) == pytest.approx(papers, rel=1e-12)


def test_zero_bubble_schedules_have_smaller_bubbles_than_1f1b() -> None:
    bubbles = {
        name: timeline(PipelineSchedule(name, degree=4, microbatches=8)).bubble_fraction
        for name in SCHEDULES
    }
    for name in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"):
        assert bubbles[name] < bubbles["interleaved_1f1b"] < bubbles["1f1b"]


def test_invalid_action_times_are_refused() -> None:
    schedule = PipelineSchedule("1f1b", degree=2, microbatches=2)
    with pytest.raises(ValueError, match=r"backward=0: not positive"):
        timeline(schedule, backward=0)
    with pytest.raises(ValueError, match="forward=nan"):
        timeline(schedule, forward=math.nan)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 9, 32])
def test_1f1b_holds_fewer_activations_than_gpipe(degree: int, microbatches: int) -> None:
    def held(name: str) -> tuple[int, ...]:
        schedule = PipelineSchedule(name, degree=degree, microbatches=microbatches)
        return PipelineMemoryStats.from_schedule(schedule).live_activations

    assert held("gpipe") == (microbatches,) * degree
    assert held("1f1b") == tuple(min(degree - stage, microbatches) for stage in range(degree))


def test_activation_bytes_follow_held_micro_batches() -> None:
    schedule = PipelineSchedule("1f1b", degree=2, microbatches=4)
    assert PipelineMemoryStats.from_schedule(schedule).activation_bytes is None
    stats = PipelineMemoryStats.from_schedule(schedule, [100, 30])
    assert stats.activation_bytes == (200, 30)
    assert stats.bubble_fraction == pytest.approx(1 / 5)
    with pytest.raises(ValueError, match="has 1 numbers: there are 2 stages"):
        PipelineMemoryStats.from_schedule(schedule, [100])


class SavedBytes:
    """Counts the bytes that autograd saves for backward on this thread, except weights."""

    def __init__(self, module: nn.Module) -> None:
        self.most = self._now = 0
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._holders: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Any:
        box = SimpleBox(tensor)
        if tensor.untyped_storage().data_ptr() not in self._weights:
            pointer = tensor.data_ptr()
            if self._holders[pointer] == 0:
                self._now += tensor.nbytes
                self.most = max(self.most, self._now)
            self._holders[pointer] += 1
            weakref.finalize(box, self._drop, pointer, tensor.nbytes)
        return box

    def _drop(self, pointer: int, count: int) -> None:
        self._holders[pointer] -= 1
        if self._holders[pointer] == 0:
            self._now -= count

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)


class SimpleBox:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def bytes_held_by_stage_0(name: str, degree: int) -> int:
    schedule = PipelineSchedule(name, degree=degree, microbatches=8)

    def work(world: World) -> int:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        stage = pipelining.PipelineStage(block, world.rank, degree, torch.device("cpu"))
        runtime = schedule.torch_class(stage, 8, loss_fn=F.mse_loss)
        inputs = torch.randn(8 * 16, 32)
        for turn in range(2):  # the first round also lets stages exchange shapes
            saved = SavedBytes(block)
            with saved.hooks():
                first, last = world.rank == 0, world.rank == degree - 1
                runtime.step(*([inputs] if first else []), **({"target": inputs} if last else {}))
            assert turn == 0 or saved._now == 0
        return saved.most

    return World.mock(degree, timeout_s=20).run(work)[0]


@pytest.mark.parametrize("degree", [2, 4])
def test_1f1b_needs_less_memory_than_gpipe(degree: int) -> None:
    ratio = bytes_held_by_stage_0("gpipe", degree) / bytes_held_by_stage_0("1f1b", degree)
    assert ratio == pytest.approx(8 / degree, rel=0.03)
