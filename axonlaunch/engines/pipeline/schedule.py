"""The order in which each rank of a pipeline carries out forwards and backwards, read from torch.

It refuses sizes that a schedule can't order; how long the actions take is ``timeline``'s.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed import pipelining

from axonlaunch.config.errors import one_of
from axonlaunch.config.schedule_rules import SCHEDULES, ScheduleRule

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
    """What a rank does with one micro-batch on one of its stages.

    Attributes:
        kind: F forward; B backward, whole; I gradients of inputs; W gradients of weights.
        stage: Which part of the model, from 0.
        microbatch: Which part of the round's samples, from 0.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, init=False)
class PipelineSchedule:
    """One round of micro-batches through a pipeline, as torch's runtime carries it out.

    Args:
        name: One of ``config.schedule_rules.SCHEDULES``.
        degree: Ranks that the stages are divided among.
        microbatches: Parts that the samples of one round are divided into.
        stages_per_rank: Stages that each rank holds; None: as many as is usual for the schedule.

    Attributes:
        name: As given.
        degree: As given.
        microbatches: As given.
        stages_per_rank: As given, or the schedule's own.
        torch_class: The schedule's class in ``torch.distributed.pipelining``.
        rank_of_stage: The rank that holds each stage.
        actions: What each rank does, first to last; a row a rank.

    Raises:
        ValueError: The schedule can't order so many stages or micro-batches.
    """

    name: str
    degree: int
    microbatches: int
    stages_per_rank: int
    torch_class: type = field(repr=False, compare=False)
    rank_of_stage: tuple[int, ...] = field(repr=False, compare=False)
    actions: tuple[tuple[Action, ...], ...] = field(repr=False, compare=False)

    def __init__(
        self, name: str, *, degree: int, microbatches: int, stages_per_rank: int | None = None
    ) -> None:
        if name not in SCHEDULES:
            raise ValueError(f"schedule={name}: there is no such; use {one_of([*SCHEDULES])}")
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
            object.__setattr__(self, key, value)  # the value is frozen from here on

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.degree * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def __str__(self) -> str:
        """Write a row a rank, each action as torch does: stage, kind, micro-batch."""
        rows = [[str(action) for action in row] for row in self.actions]
        width = max(len(cell) for row in rows for cell in row)
        head = len(f"rank {self.degree - 1}")
        return "\n".join(
            f"{f'rank {rank}':<{head}}  {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
            for rank, row in enumerate(rows)
        )


def _check(
    name: str, rule: ScheduleRule, *, degree: int, microbatches: int, stages_per_rank: int
) -> None:
    if degree < 2:
        raise ValueError(f"degree={degree}: a pipeline has at least 2 ranks; use 2 or more")
    if stages_per_rank < 1 or (rule.fixed and stages_per_rank != rule.stages_per_rank):
        legal = f"{rule.stages_per_rank}" if rule.fixed else "1 or more"
        raise ValueError(f"stages_per_rank={stages_per_rank}: {name} has {legal}; use {legal}")
    sizes = {"degree": degree, "stages_per_rank": stages_per_rank}
    if rule.fits(microbatches, **sizes):
        return
    least = rule.least_microbatches(**sizes)
    if microbatches < least:
        raise ValueError(
            f"microbatches={microbatches}: {name} on {degree} ranks needs at least {least}; "
            f"use {least} or more"
        )
    below = next(n for n in range(microbatches, 0, -1) if rule.fits(n, **sizes))
    above = next(n for n in itertools.count(microbatches) if rule.fits(n, **sizes))
    raise ValueError(
        f"microbatches={microbatches}: {name} on {degree} ranks needs as many in each round of "
        f"about {degree}; use {below} or {above}"
    )


def _ranks(rule: ScheduleRule, *, degree: int, stages_per_rank: int) -> tuple[int, ...]:
    """Deal stages out to ranks: round and round, or to the last rank and back."""
    there = tuple(range(degree))
    if rule.v_shaped:
        return there + there[::-1]
    return there * stages_per_rank


# What follows knows private parts of torch; tests/engines/test_pipeline_schedule.py holds it
# against real runs and says what to change when torch does.


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
    """Order one stage: forwards ahead, then a backward and a forward in turn, then backwards.

    The loops of ``_step_microbatches`` in torch's ScheduleGPipe, which has all forwards ahead, and
    Schedule1F1B. Their ``pipeline_order`` is no substitute: up to torch 2.13 that of 1F1B counts
    the last rank's forwards from 1, and it gives GPipe a ``REDUCE_GRAD`` in the midst.
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
    """Read ``pipeline_order``, which torch's multi-stage schedules make for all ranks at once."""
    schedule: Any = torch_class(stages_of_sizes(degree, stages_per_rank), microbatches)
    return tuple(
        tuple(part for action in schedule.pipeline_order[rank] for part in _unfold(action))
        for rank in range(degree)
    )


def stages_of_sizes(degree: int, stages_per_rank: int) -> list[Any]:
    """Return stand-ins for rank 0's stages, without a module and a group.

    Making a schedule of torch reads only sizes of its stages.
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
    """Yield an action of torch's: none for an idle step, each part of an overlapped pair."""
    if action is None:
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from _unfold(part)
        return
    yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)
