"""When a pipeline's actions happen, how long its ranks wait, and what its stages hold meanwhile.

Arithmetic on a ``PipelineSchedule``: it measures nothing and leaves communication out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from axonlaunch.engines.pipeline.schedule import Action, PipelineSchedule


@dataclass(frozen=True)
class TimelineSlot:
    """One action in time."""

    rank: int
    start: float
    stop: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Every action of one round, by rank and then by time."""

    schedule: PipelineSchedule
    slots: tuple[TimelineSlot, ...]

    @property
    def span(self) -> float:
        """Time from the first action's start to the last one's stop."""
        return max(slot.stop for slot in self.slots)

    @property
    def rank_forward(self) -> float:
        """Time that a micro-batch takes through all stages of a rank."""
        return self.schedule.stages_per_rank * next(
            slot.stop - slot.start for slot in self.slots if slot.action.kind == "F"
        )

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time, up to the last stop, in which they wait.

        With p ranks, m micro-batches and v stages per rank it is (p - 1) / (m + p - 1) under GPipe
        and 1F1B, whatever a backward takes, and (p - 1) / (v m + p - 1) under interleaved 1F1B
        where p divides m. Source: Narayanan et al. 2021, arXiv 2104.04473, sections 2.2.1 and
        2.2.2, which give it as a share of the busy time: (p - 1) / m and (p - 1) / (v m).
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
    """Start every action as soon as its rank is free and what it needs is there.

    Args:
        schedule: The order of the actions on each rank.
        forward: Time that a micro-batch takes through one stage; of all, or of each.
        backward: Time that its whole backward takes through one stage; gradients of inputs and of
            weights take half of it each.
        message: Time from the end of an action on one rank until the next stage's rank has its
            result.

    Raises:
        ValueError: A time is not positive, or there is not one a stage.
    """
    forwards = _by_stage("forward", forward, num_stages=schedule.num_stages)
    backwards = _by_stage("backward", backward, num_stages=schedule.num_stages)
    fractions = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}
    holders = schedule.rank_of_stage
    done: dict[Action, float] = {}
    rows: list[list[TimelineSlot]] = [[] for _ in schedule.actions]
    waiting = True
    while waiting:
        waiting = False
        before = len(done)
        for rank, (row, actions) in enumerate(zip(rows, schedule.actions, strict=True)):
            for action in actions[len(row) :]:
                needs = _needs(action, last_stage=schedule.num_stages - 1)
                if not all(any(need in done for need in either) for either in needs):
                    waiting = True
                    break
                ready = [
                    done[need] + (message if holders[need.stage] != rank else 0.0)
                    for either in needs
                    for need in either
                    if need in done
                ]
                start = max([row[-1].stop if row else 0.0, *ready])
                times = forwards if action.kind == "F" else backwards
                done[action] = start + fractions[action.kind] * times[action.stage]
                row.append(TimelineSlot(rank, start, done[action], action))
        assert not waiting or len(done) > before, f"{schedule!r} waits for itself"
    return Timeline(schedule, tuple(slot for row in rows for slot in row))


def _by_stage(name: str, value: float | Sequence[float], *, num_stages: int) -> list[float]:
    """Return the time of each stage."""
    times = list(value) if isinstance(value, Sequence) else [value] * num_stages
    if len(times) != num_stages:
        raise ValueError(f"{name} has {len(times)} times: there are {num_stages} stages")
    for duration in times:
        if not duration > 0:
            raise ValueError(f"{name}={duration}: an action takes time; use a positive number")
    return times


def _needs(action: Action, *, last_stage: int) -> list[tuple[Action, ...]]:
    """Return what must be done before an action; of each tuple any one."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [(Action("F", stage - 1, microbatch),)] if stage else []
    if action.kind == "W":
        return [(Action("I", stage, microbatch),)]
    own = (Action("F", stage, microbatch),)
    if stage == last_stage:
        return [own]
    return [own, (Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch))]


@dataclass(frozen=True)
class PipelineMemoryStats:
    """What a schedule costs: activations held for backward, and ranks waiting.

    Attributes:
        live_activations: By stage, the most micro-batches whose activations it holds at once. A
            forward adds one; a whole backward, or gradients of weights, release it. Gradients of
            inputs alone already release some of its bytes, which is not counted.
        bubble_fraction: ``Timeline.bubble_fraction`` where a backward takes twice a forward.
        activation_bytes: By stage, the bytes of those; None where a micro-batch's are unknown.
    """

    live_activations: tuple[int, ...]
    bubble_fraction: float
    activation_bytes: tuple[int, ...] | None = None

    @classmethod
    def from_schedule(
        cls, schedule: PipelineSchedule, microbatch_bytes: Sequence[int] | None = None
    ) -> Self:
        """Follow a schedule through one round.

        Args:
            schedule: The order of the actions on each rank.
            microbatch_bytes: Bytes that one micro-batch's activations take on each stage.

        Raises:
            ValueError: There is not one number of bytes a stage.
        """
        live: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for action in (action for row in schedule.actions for action in row):
            if action.kind == "F":
                live[action.stage] += 1
                most[action.stage] = max(most[action.stage], live[action.stage])
            elif action.kind in ("B", "W"):
                live[action.stage] -= 1
        per_stage = tuple(most[stage] for stage in range(schedule.num_stages))
        in_bytes = None
        if microbatch_bytes is not None:
            if len(microbatch_bytes) != len(per_stage):
                raise ValueError(
                    f"microbatch_bytes has {len(microbatch_bytes)} numbers: "
                    f"there are {len(per_stage)} stages; give one number a stage"
                )
            in_bytes = tuple(n * each for n, each in zip(per_stage, microbatch_bytes, strict=True))
        return cls(per_stage, timeline(schedule).bubble_fraction, in_bytes)
