"""The order of forwards and backwards on each rank of a pipeline, as torch's runtime executes them.

Sizes that a schedule does not support are an error. Durations are computed by ``timeline``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, Self

from torch.distributed import pipelining

from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.schedule_rules import SCHEDULES, ScheduleRule
from axonlaunch.config.problems.errors import one_of

ActionKind = Literal["F", "B", "I", "W"]

TORCH_CLASSES: dict[str, type] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Action:
    """One computation of a rank: a micro-batch on one of its stages.

    Attributes:
        kind: F is a forward, B a full backward, I input gradients, W weight gradients.
        stage: Stage number, from 0.
        microbatch: Micro-batch number within the round, from 0.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, init=False)
class PipelineSchedule:
    """One round of micro-batches through a pipeline, as executed by torch's runtime.

    Args:
        name: Name of the schedule, one of ``config.consistency.schedule_rules.SCHEDULES``.
        degree: Number of ranks among which the stages are divided.
        microbatches: Number of micro-batches per round.
        stages_per_rank: Number of stages on each rank; None for the schedule's default.

    Attributes:
        name: Name of the schedule.
        degree: Number of ranks.
        microbatches: Number of micro-batches per round.
        stages_per_rank: Number of stages on each rank.
        torch_class: The schedule's class in ``torch.distributed.pipelining``.
        rank_of_stage: The rank that holds each stage.
        actions: Each rank's actions in order, one row per rank.

    Raises:
        ValueError: The schedule does not support this number of stages or micro-batches.
    """

    name: str
    degree: int
    microbatches: int
    stages_per_rank: int
    torch_class: type = field(repr=False, compare=False)
    rank_of_stage: tuple[int, ...] = field(repr=False, compare=False)
    actions: tuple[tuple[Action, ...], ...] = field(repr=False, compare=False)

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Return the schedule of a layout's rounds."""
        return cls(
            layout.schedule,
            degree=layout.pipeline,
            microbatches=layout.microbatches_per_round,
            stages_per_rank=layout.stages_per_rank,
        )

    def __init__(
        self, name: str, *, degree: int, microbatches: int, stages_per_rank: int | None = None
    ) -> None:
        if name not in SCHEDULES:
            raise ValueError(f"schedule={name}: no such schedule; use {one_of([*SCHEDULES])}")
        rule = SCHEDULES[name]
        stages = rule.stages_per_rank if stages_per_rank is None else stages_per_rank
        _check(name, rule, degree=degree, microbatches=microbatches, stages_per_rank=stages)
        values = {
            "name": name,
            "degree": degree,
            "microbatches": microbatches,
            "stages_per_rank": stages,
            "torch_class": TORCH_CLASSES[name],
            "rank_of_stage": _ranks(rule, degree=degree, stages_per_rank=stages),
            "actions": _actions(name, degree, microbatches, stages),
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)  # the dataclass is frozen

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.degree * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of the model."""
        return tuple(
            stage for stage, stage_rank in enumerate(self.rank_of_stage) if stage_rank == rank
        )

    def __str__(self) -> str:
        """Format one row per rank, with actions in torch's notation: stage, kind, micro-batch."""
        rows = [[str(action) for action in row] for row in self.actions]
        width = max(len(cell) for row in rows for cell in row)
        label = len(f"rank {self.degree - 1}")
        return "\n".join(
            f"{f'rank {rank}':<{label}}  {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
            for rank, row in enumerate(rows)
        )


def _check(
    name: str, rule: ScheduleRule, *, degree: int, microbatches: int, stages_per_rank: int
) -> None:
    if degree < 2:
        raise ValueError(f"degree={degree}: a pipeline has at least 2 ranks; use 2 or more")
    if stages_per_rank < 1 or (rule.fixed and stages_per_rank != rule.stages_per_rank):
        valid = f"{rule.stages_per_rank}" if rule.fixed else "1 or more"
        raise ValueError(f"stages_per_rank={stages_per_rank}: {name} has {valid}; use {valid}")
    sizes = {"degree": degree, "stages_per_rank": stages_per_rank}
    if rule.fits(microbatches, **sizes):
        return
    minimum = rule.least_microbatches(**sizes)
    if microbatches < minimum:
        raise ValueError(
            f"microbatches={microbatches}: {name} on {degree} ranks needs at least {minimum}; "
            f"use {minimum} or more"
        )
    below = next(n for n in range(microbatches, 0, -1) if rule.fits(n, **sizes))
    above = next(n for n in itertools.count(microbatches) if rule.fits(n, **sizes))
    raise ValueError(
        f"microbatches={microbatches}: {name} on {degree} ranks needs a number that divides into "
        f"equal rounds of about {degree}; use {below} or {above}"
    )


def _ranks(rule: ScheduleRule, *, degree: int, stages_per_rank: int) -> tuple[int, ...]:
    """Assign stages to ranks: cyclically, or to the last rank and back (V-shaped)."""
    ascending = tuple(range(degree))
    if rule.v_shaped:
        return ascending + ascending[::-1]
    return ascending * stages_per_rank


# The rest of this file relies on private parts of torch. tests/engines/test_pipeline_schedule.py
# compares it with real runs and says what to change when torch changes.


@functools.lru_cache(maxsize=64)
def _actions(
    name: str, degree: int, microbatches: int, stages_per_rank: int
) -> tuple[tuple[Action, ...], ...]:
    if name == "gpipe":
        return tuple(_warm_up(rank, microbatches, microbatches) for rank in range(degree))
    if name == "1f1b":
        return tuple(
            _warm_up(rank, microbatches, min(microbatches, degree - rank)) for rank in range(degree)
        )
    return _order_of_torch(TORCH_CLASSES[name], degree, microbatches, stages_per_rank)


def _warm_up(stage: int, microbatches: int, ahead: int) -> tuple[Action, ...]:
    """Return the actions of one stage: ``ahead`` forwards, then alternating backwards and forwards.

    These are the loops of ``_step_microbatches`` in torch's Schedule1F1B and ScheduleGPipe; the
    latter runs all forwards ahead. Their ``pipeline_order`` cannot be used instead: up to torch
    2.13, that of 1F1B counts the last rank's forwards from 1, and that of GPipe contains a
    ``REDUCE_GRAD`` in the middle.
    """
    order = [Action("F", stage, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        order.append(Action("B", stage, microbatch))
        if ahead + microbatch < microbatches:
            order.append(Action("F", stage, ahead + microbatch))
    return tuple(order)


def _order_of_torch(
    torch_class: type, degree: int, microbatches: int, stages_per_rank: int
) -> tuple[tuple[Action, ...], ...]:
    """Read ``pipeline_order``, which torch's multi-stage schedules compute for all ranks."""
    schedule: Any = torch_class(stages_of_sizes(degree, stages_per_rank), microbatches)
    return tuple(
        tuple(part for action in schedule.pipeline_order[rank] for part in _unfold(action))
        for rank in range(degree)
    )


def stages_of_sizes(degree: int, stages_per_rank: int) -> list[Any]:
    """Return fake stages of rank 0, without module and process group.

    The constructor of a torch schedule reads only the sizes of its stages.
    """
    return [
        SimpleNamespace(
            stage_index=turn * degree,
            num_stages=degree * stages_per_rank,
            group_size=degree,
            group_rank=0,
            submod=None,
            has_backward=True,
        )
        for turn in range(stages_per_rank)
    ]


def _unfold(action: Any) -> Iterator[Action]:
    """Yield the actions of a torch action: none for an idle step, both of an overlapped pair."""
    if action is None:
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from _unfold(part)
        return
    yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)
