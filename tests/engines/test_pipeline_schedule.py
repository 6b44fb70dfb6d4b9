"""Pipeline schedules, compared with the order in which torch executes them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

import axonlaunch
from axonlaunch.comm import World
from axonlaunch.config.consistency.schedule_rules import SCHEDULES, ScheduleRule
from axonlaunch.engines.pipeline.schedule import (
    TORCH_CLASSES,
    Action,
    PipelineSchedule,
    stages_of_sizes,
)
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats

WIDTH, ROWS = 4, 2
MOVED = (
    "torch's pipelining schedules changed inside; read schedules.py of the new torch and mend the "
    "last part of axonlaunch/engines/pipeline/schedule.py until the real runs below agree again"
)
RUNS = [
    ("gpipe", 2, 1, 3),
    ("gpipe", 4, 1, 8),
    ("1f1b", 2, 1, 2),
    ("1f1b", 3, 1, 7),
    ("1f1b", 4, 1, 8),
    ("interleaved_1f1b", 2, 1, 4),
    ("interleaved_1f1b", 2, 3, 6),
    ("interleaved_1f1b", 4, 2, 10),
    ("looped_bfs", 2, 2, 5),
    ("looped_bfs", 3, 3, 4),
    ("interleaved_zero_bubble", 2, 2, 4),
    ("interleaved_zero_bubble", 3, 3, 5),
    ("interleaved_zero_bubble", 4, 2, 8),
    ("zbv_zero_bubble", 2, 2, 2),
    ("zbv_zero_bubble", 4, 2, 8),
    ("dualpipev", 2, 2, 4),
    ("dualpipev", 3, 2, 7),
    ("dualpipev", 4, 2, 10),
]


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))
    return nn.Sequential(*layers)


def batch(microbatches: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, microbatches * ROWS, WIDTH, generator=generator)


@dataclass
class Record:
    """The actions of torch's stages by rank, and the activations that they held by stage."""

    actions: dict[int, list[Action]]
    most_held: Counter[int]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Record the actions of all of torch's stages."""
    recorded = Record(defaultdict(list), Counter())

    def watch(name: str, kind: Callable[[dict[str, Any]], str]) -> None:
        real = getattr(pipelining.PipelineStage, name, None)
        assert real is not None, MOVED

        def reported(stage: Any, microbatch: int, *args: Any, **options: Any) -> Any:
            action = Action(kind(options), stage.stage_index, microbatch)  # type: ignore[arg-type]
            recorded.actions[stage.group_rank].append(action)
            result = real(stage, microbatch, *args, **options)
            live = len(stage.fwd_cache) + len(stage.backward_state)
            most = recorded.most_held
            most[stage.stage_index] = max(most[stage.stage_index], live)
            return result

        monkeypatch.setattr(pipelining.PipelineStage, name, reported)

    watch("forward_one_chunk", lambda _: "F")
    watch("backward_one_chunk", lambda options: "B" if options.get("full_backward", True) else "I")
    watch("backward_weight_one_chunk", lambda _: "W")
    return recorded


def run_for_real(schedule: PipelineSchedule) -> tuple[float, list[Tensor]]:
    """Run one round with torch on rank threads; return the loss and all gradients, by stage."""
    inputs, targets = batch(schedule.microbatches)

    def work(world: World) -> tuple[float, dict[int, list[Tensor | None]]]:
        model, mine = blocks(schedule.num_stages), schedule.stages_of(world.rank)
        stages = [
            pipelining.PipelineStage(model[i], i, schedule.num_stages, torch.device("cpu"))
            for i in mine
        ]
        single = issubclass(schedule.torch_class, pipelining.schedules.PipelineScheduleSingle)
        runtime = schedule.torch_class(
            stages[0] if single else stages, schedule.microbatches, loss_fn=F.mse_loss
        )
        losses: list[Tensor] = []
        has_last = schedule.num_stages - 1 in mine
        runtime.step(
            *([inputs] if 0 in mine else []),
            **({"target": targets, "losses": losses} if has_last else {}),
        )
        loss = torch.stack(losses).mean().item() if losses else 0.0
        return loss, {i: [p.grad for p in model[i].parameters()] for i in mine}

    outcomes = World.mock(schedule.degree, timeout_s=20).run(work)
    by_stage = {stage: grads for _, of_rank in outcomes for stage, grads in of_rank.items()}
    gradients = [gradient for stage in sorted(by_stage) for gradient in by_stage[stage]]
    return sum(loss for loss, _ in outcomes), gradients


@pytest.mark.parametrize(("name", "degree", "stages_per_rank", "microbatches"), RUNS)
def test_torch_executes_pipeline_schedule_and_equals_one_process(
    name: str, degree: int, stages_per_rank: int, microbatches: int, record: Record
) -> None:
    schedule = PipelineSchedule(
        name, degree=degree, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    loss, gradients = run_for_real(schedule)
    ran = tuple(tuple(record.actions[rank]) for rank in range(degree))
    assert ran == schedule.actions, MOVED
    live = tuple(record.most_held[stage] for stage in range(schedule.num_stages))
    assert live == PipelineMemoryStats.from_schedule(schedule).live_activations
    alone, (inputs, targets) = blocks(schedule.num_stages), batch(microbatches)
    expected = F.mse_loss(alone(inputs), targets)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for ours, parameter in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)


def test_pipeline_schedule_of_architecture_page_runs(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(axonlaunch.__file__).parent / "docs" / "architecture.md"
    [example] = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    monkeypatch.setitem(SCHEDULES, "looped_dfs", ScheduleRule(stages_per_rank=2, fixed=False))
    monkeypatch.setitem(TORCH_CLASSES, "looped_dfs", names["ScheduleLoopedDFS"])
    test_torch_executes_pipeline_schedule_and_equals_one_process("looped_dfs", 2, 2, 4, record)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_schedule_runs_for_all_allowed_sizes(name: str, record: Record) -> None:
    for degree, stages_per_rank, microbatches in sizes(name):
        if not legal(name, degree, stages_per_rank, microbatches):
            continue
        record.actions.clear()
        record.most_held.clear()
        test_torch_executes_pipeline_schedule_and_equals_one_process(
            name, degree, stages_per_rank, microbatches, record
        )


def sizes(name: str) -> list[tuple[int, int, int]]:
    """List degrees, stages per rank and numbers of micro-batches to test."""
    rule = SCHEDULES[name]
    turns = (rule.stages_per_rank,) if rule.fixed else (1, 2, 3)
    return [(p, v, m) for p in (2, 3, 4) for v in turns for m in range(1, 13)]


def legal(name: str, degree: int, stages_per_rank: int, microbatches: int) -> bool:
    return SCHEDULES[name].fits(microbatches, degree=degree, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_schedule_rules_refuse_more_than_torch(
    name: str,
) -> None:
    for degree, stages_per_rank, microbatches in sizes(name):
        stages = stages_of_sizes(degree, stages_per_rank)
        make: Any = TORCH_CLASSES[name]
        single = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
        try:
            make(stages[0] if single else stages, microbatches, loss_fn=F.mse_loss)
            torch_can = True
        except ValueError:
            torch_can = False
        can = legal(name, degree, stages_per_rank, microbatches)
        assert can == (torch_can and microbatches >= degree), (degree, microbatches)


def test_torch_pipelining_has_private_names() -> None:
    schedules = pipelining.schedules
    assert schedules._Action._fields == (
        "stage_index",
        "computation_type",
        "microbatch_index",
        "sub_actions",
    ), MOVED
    kinds = {kind.value for kind in schedules._ComputationType if len(kind.value) == 1}
    assert kinds == {"F", "B", "I", "W"}, MOVED
    for make in TORCH_CLASSES.values():
        multi = issubclass(make, schedules._PipelineScheduleRuntime)
        assert multi or make in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B), MOVED


def test_torch_1f1b_pipeline_order_is_still_unusable() -> None:
    """If this fails, torch is fixed: read 1F1B's ``pipeline_order`` like that of the other
    schedules.
    """
    stage: Any = SimpleNamespace(num_stages=2, group_size=2, stage_index=0, has_backward=True)
    order = pipelining.Schedule1F1B(stage, 4).pipeline_order
    assert order is not None
    last = [str(action) for action in order[1] if action is not None]
    assert "1F0" not in last


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("2f2b", {}, "schedule=2f2b: no such schedule; use gpipe, 1f1b, .* or dualpipev"),
        ("1f1b", {"degree": 1}, "degree=1: a pipeline has at least 2 ranks; use 2 or more"),
        ("1f1b", {"stages_per_rank": 2}, "stages_per_rank=2: 1f1b has 1; use 1"),
        ("zbv_zero_bubble", {"stages_per_rank": 3}, "stages_per_rank=3: zbv_.* has 2; use 2"),
        ("looped_bfs", {"stages_per_rank": 0}, "stages_per_rank=0: .* use 1 or more"),
        ("1f1b", {"microbatches": 3}, "microbatches=3: 1f1b on 4 ranks .* least 4; use 4 or more"),
        ("dualpipev", {"microbatches": 7}, "microbatches=7: .* at least 8; use 8 or more"),
        ("interleaved_1f1b", {"microbatches": 9}, "microbatches=9: .* about 4; use 8 or 10"),
    ],
)
def test_unknown_pipeline_schedule_is_refused_with_choices(
    name: str, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineSchedule(name, **{"degree": 4, "microbatches": 8, **sizes})


def test_pipeline_schedule_prints_like_torch() -> None:
    schedule = PipelineSchedule("1f1b", degree=2, microbatches=2)
    assert str(schedule) == "rank 0  0F0 0F1 0B0 0B1\nrank 1  1F0 1B0 1F1 1B1"
    assert schedule == PipelineSchedule("1f1b", degree=2, microbatches=2, stages_per_rank=1)
    assert len({schedule, PipelineSchedule("1f1b", degree=2, microbatches=2)}) == 1
    assert schedule != PipelineSchedule("gpipe", degree=2, microbatches=2)
    assert schedule.torch_class is pipelining.Schedule1F1B
    with pytest.raises(AttributeError):
        schedule.degree = 3  # type: ignore[misc]


def test_stages_are_placed_in_loop_or_v_shape() -> None:
    looped = PipelineSchedule("looped_bfs", degree=2, microbatches=2, stages_per_rank=3)
    assert looped.rank_of_stage == (0, 1, 0, 1, 0, 1)
    assert looped.stages_of(1) == (1, 3, 5)
    v_shaped = PipelineSchedule("zbv_zero_bubble", degree=3, microbatches=6)
    assert v_shaped.rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert [v_shaped.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
