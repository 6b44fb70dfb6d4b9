"""Computes a pipeline's timeline: start of each action, idle time, and live activations.

The results are calculated from a ``PipelineSchedule`` and given durations; nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from axonlaunch.engines.pipeline.schedule import Action, PipelineSchedule


@dataclass(frozen=True)
class TimelineSlot:
    """One action with its rank, start and stop."""

    rank: int
    start: float
    stop: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """All actions of one round, by rank and then by time."""

    schedule: PipelineSchedule
    slots: tuple[TimelineSlot, ...]

    @property
    def span(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(slot.stop for slot in self.slots)

    @property
    def rank_forward(self) -> float:
        """Time of a micro-batch's forward through all stages of a rank."""
        return self.schedule.stages_per_rank * next(
            slot.stop - slot.start for slot in self.slots if slot.action.kind == "F"
        )

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time, up to the end of the last action, that is idle.

        With p ranks, m micro-batches and v stages per rank, it is (p - 1) / (m + p - 1) for GPipe
        and 1F1B, independent of the duration of a backward. It is (p - 1) / (v m + p - 1) for
        interleaved 1F1B if p divides m. Source: Narayanan et al. 2021, arXiv 2104.04473, sections
        2.2.1 and 2.2.2, which state it as a fraction of the busy time: (p - 1) / m and (p - 1) / (v
        m).
        """
        busy = sum(slot.stop - slot.start for slot in self.slots)
        return 1 - busy / (self.schedule.degree * self.span)


def timeline(
    schedule: PipelineSchedule,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    message: float = 0.0,
) -> Timeline:
    """Start every action as soon as its rank is free and its inputs are available.

    Args:
        schedule: Order of the actions on each rank.
        forward: Duration of a micro-batch's forward through one stage, for all stages or for each.
        backward: Duration of its full backward through one stage. Input gradients and weight
            gradients take half of it each.
        message: Time from the end of an action until the next stage's rank has its result.

    Raises:
        ValueError: A duration is not positive, or the number of durations is not the number of
            stages.
    """
    forwards = _stage_times("forward", forward, num_stages=schedule.num_stages)
    backwards = _stage_times("backward", backward, num_stages=schedule.num_stages)
    fractions = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}
    rank_of_stage = schedule.rank_of_stage
    done: dict[Action, float] = {}
    rows: list[list[TimelineSlot]] = [[] for _ in schedule.actions]
    waiting = True
    while waiting:
        waiting = False
        num_done = len(done)
        for rank, (row, actions) in enumerate(zip(rows, schedule.actions, strict=True)):
            for action in actions[len(row) :]:
                dependencies = _dependencies(action, last_stage=schedule.num_stages - 1)
                if not all(
                    any(dependency in done for dependency in alternatives)
                    for alternatives in dependencies
                ):
                    waiting = True
                    break
                ready = [
                    done[dependency] + (message if rank_of_stage[dependency.stage] != rank else 0.0)
                    for alternatives in dependencies
                    for dependency in alternatives
                    if dependency in done
                ]
                start = max([row[-1].stop if row else 0.0, *ready])
                times = forwards if action.kind == "F" else backwards
                done[action] = start + fractions[action.kind] * times[action.stage]
                row.append(TimelineSlot(rank, start, done[action], action))
        assert not waiting or len(done) > num_done, f"{schedule!r} waits for itself"
    return Timeline(schedule, tuple(slot for row in rows for slot in row))


def _stage_times(name: str, value: float | Sequence[float], *, num_stages: int) -> list[float]:
    """Return the time of each stage."""
    times = list(value) if isinstance(value, Sequence) else [value] * num_stages
    if len(times) != num_stages:
        raise ValueError(f"{name} has {len(times)} times; give one for each of {num_stages} stages")
    for duration in times:
        if not duration > 0:
            raise ValueError(f"{name}={duration}: not positive; use a number above 0")
    return times


def _dependencies(action: Action, *, last_stage: int) -> list[tuple[Action, ...]]:
    """Return the actions that must finish before an action; of each tuple, any one is enough."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [(Action("F", stage - 1, microbatch),)] if stage else []
    if action.kind == "W":
        return [(Action("I", stage, microbatch),)]
    own_forward = (Action("F", stage, microbatch),)
    if stage == last_stage:
        return [own_forward]
    return [own_forward, (Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch))]


@dataclass(frozen=True)
class PipelineMemoryStats:
    """Costs of a schedule: activations held for backward, and idle time.

    Attributes:
        live_activations: Maximum number of micro-batches with live activations, by stage. A forward
            adds one; a full backward or weight gradients release it. Input gradients release part
            of the bytes earlier, which is not counted.
        bubble_fraction: ``Timeline.bubble_fraction`` if a backward takes twice as long as a
            forward.
        activation_bytes: Bytes of the live activations, by stage; None if the bytes of a
            micro-batch are unknown.
    """

    live_activations: tuple[int, ...]
    bubble_fraction: float
    activation_bytes: tuple[int, ...] | None = None

    @classmethod
    def from_schedule(
        cls, schedule: PipelineSchedule, microbatch_bytes: Sequence[int] | None = None
    ) -> Self:
        """Simulate one round of a schedule.

        Args:
            schedule: Order of the actions on each rank.
            microbatch_bytes: Bytes of one micro-batch's activations, by stage.

        Raises:
            ValueError: The number of entries of ``microbatch_bytes`` is not the number of stages.
        """
        live: Counter[int] = Counter()
        maximum: Counter[int] = Counter()
        for action in (action for row in schedule.actions for action in row):
            if action.kind == "F":
                live[action.stage] += 1
                maximum[action.stage] = max(maximum[action.stage], live[action.stage])
            elif action.kind in ("B", "W"):
                live[action.stage] -= 1
        per_stage = tuple(maximum[stage] for stage in range(schedule.num_stages))
        in_bytes = None
        if microbatch_bytes is not None:
            if len(microbatch_bytes) != len(per_stage):
                raise ValueError(
                    f"microbatch_bytes has {len(microbatch_bytes)} numbers: "
                    f"there are {len(per_stage)} stages; give one number per stage"
                )
            in_bytes = tuple(n * size for n, size in zip(per_stage, microbatch_bytes, strict=True))
        return cls(per_stage, timeline(schedule).bubble_fraction, in_bytes)
