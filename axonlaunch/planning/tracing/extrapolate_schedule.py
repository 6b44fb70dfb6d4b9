"""Estimates a long step of a long pipeline from a short step of a short one, action by action.

What a rank's action changes, and what it holds beside what stood before it, depends on what it does
and on its neighbours in the schedule, not on how many micro-batches wait. So every action of the
long step is given what a like one of the short step did. Receive buffers differ with a schedule's
neighbours, so the result is exact to about one activation between stages.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch.distributed import pipelining

from axonlaunch.engines.pipeline.schedule import Action, ActionKind
from axonlaunch.planning.tracing.storage_trace import (
    CATEGORIES,
    Category,
    Point,
    StorageTrace,
    TraceEvent,
    on_device,
)

_ACTION = "action"
_SETTLED = 3
"""Times after which an action finds what it always finds: the first backward makes gradients, the
second may turn them into another type, and what that frees is gone one later.
"""


@dataclass(frozen=True)
class ActionContext:
    """What distinguishes one action from another.

    Attributes:
        kind: What is done.
        stage: On which of the rank's stages, from 0.
        is_first: Whether this was never done on the stage in the step.
        done: How often each kind was, ``_SETTLED`` standing for more.
        begins: Whether nothing of it was in the round.
        ends: Whether nothing of it will be in the round.
        before: Kind and stage of the actions before, the nearest last.
        after: The same of the action after.
    """

    kind: ActionKind
    stage: int
    is_first: bool
    done: tuple[int, ...]
    begins: bool
    ends: bool
    before: tuple[tuple[ActionKind, int], ...]
    after: tuple[tuple[ActionKind, int], ...]

    def likeness(self, other: ActionContext) -> tuple[int, ...]:
        """Say how far both agree, what matters most first."""
        return (
            (self.kind, self.stage) == (other.kind, other.stage),
            self.ends == other.ends,
            self.is_first == other.is_first,
            self.before[-1:] == other.before[-1:],
            -sum(abs(a - b) for a, b in zip(self.done, other.done, strict=True)),
            self.after == other.after,
            self.before == other.before,
            self.begins == other.begins,
        )


@dataclass(frozen=True)
class ActionEffect:
    """What an action of the short step did: the bytes at its start and end, and its highest."""

    like: ActionContext
    start: Point
    end: Point
    highest: Point
    host: int

    @property
    def left(self) -> int:
        """Bytes that stay when it is done."""
        return on_device(self.end) - on_device(self.start)


def watch_actions(trace: StorageTrace) -> None:
    """Begin an event of the trace wherever a rank's pipeline begins an action.

    It changes torch's stages for good: it belongs in a process that is forked for it.
    """
    stage: Any = pipelining.PipelineStage

    def receive(name: str, *, source: int, here: Category) -> None:
        """Say what a stage's buffers for its neighbour's tensors are for.

        A neighbour on the same rank hands its tensors on, which from then on take the place of the
        buffers: with 8 micro-batches, 8 outputs of the stage below instead of 8 messages.
        """
        prepare = getattr(stage, name)

        @functools.wraps(prepare)
        def make_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:
            neighbour = self.stage_index_to_group_rank.get(self.stage_index + source)
            with trace.during(here if neighbour == self.group_rank else "communication"):
                return prepare(self, *args, **kwargs)

        setattr(stage, name, make_buffers)

    def begin(name: str, kind_of: Any) -> None:
        run = getattr(stage, name)

        @functools.wraps(run)
        def run_and_tell(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            trace.begin(f"{_ACTION} {kind_of(kwargs)} {self.stage_index} {chunk}")
            return run(self, chunk, *args, **kwargs)

        setattr(stage, name, run_and_tell)

    receive("_prepare_forward_infra", source=-1, here="activations")
    receive("_prepare_backward_infra", source=1, here="temporary")
    begin("forward_one_chunk", lambda _: "F")
    begin("backward_one_chunk", lambda given: "B" if given.get("full_backward", True) else "I")
    begin("backward_weight_one_chunk", lambda _: "W")


def extend_schedule(
    events: Sequence[TraceEvent], *, rounds: Sequence[Sequence[Action]]
) -> list[TraceEvent]:
    """Return what a step of more actions holds.

    Args:
        events: Of a step that did each kind of action at least three times a round, watched by
            ``watch``.
        rounds: What the rank does in each round of the longer step.

    Returns:
        An event before the first action, one of each action, and those after the last.
    """
    starts = [n for n, event in enumerate(events) if _action(event) is not None]
    after = _first_update(events)
    parts = zip(starts, [*starts[1:], after], strict=True)
    done = [_action(events[n]) for n in starts]
    likes = _likes(_in_rounds([one for one in done if one is not None]))
    short = [
        _did(like, events[start:stop], events[stop].points[0])
        for like, (start, stop) in zip(likes, parts, strict=True)
    ]
    found = [*events[: starts[0]]]
    now = short[0].start
    for like in _likes(rounds):
        # Of equals the one that leaves least: a buffer kept once isn't kept for each micro-batch.
        did = max(short, key=lambda one: (like.likeness(one.like), -one.left))
        shift = _minus(now, did.start)
        held = TraceEvent((_ACTION,), [_plus(did.highest, shift)])
        # The host's most and the device's are not of one moment.
        held.points.append((*did.start[:-1], did.host + shift[-1]))
        found.append(held)
        now = _plus(did.end, shift)
    shift = _minus(now, events[after].points[0])
    return found + [shifted(event, shift) for event in events[after:]]


def left_by_forward(events: Sequence[TraceEvent]) -> dict[int, int]:
    """Return what a micro-batch's forward leaves for its backward, in bytes.

    Args:
        events: Of a step that was watched by ``watch``.

    Returns:
        ``{stage: bytes of activations}``, of the last forward of each: first ones may make what
        all share.
    """
    kept = CATEGORIES.index("activations")
    starts = [n for n, event in enumerate(events) if _action(event) is not None]
    found = {}
    for start, stop in itertools.pairwise([*starts, _first_update(events)]):
        action = _action(events[start])
        assert action is not None
        if action.kind == "F":
            found[action.stage] = events[stop].points[0][kept] - events[start].points[0][kept]
    return found


def shifted(event: TraceEvent, shift: Point) -> TraceEvent:
    """Return an event with more, or less, held all along."""
    return TraceEvent(event.name, [_plus(point, shift) for point in event.points])


def _first_update(events: Sequence[TraceEvent]) -> int:
    return next(n for n, event in enumerate(events) if event.name[0] == "update")


def _action(event: TraceEvent) -> Action | None:
    what, *words = str(event.name[0]).split()
    if what != _ACTION:
        return None
    kind: Any = words[0]
    return Action(kind, int(words[1]), int(words[2]))


def _in_rounds(actions: Sequence[Action]) -> list[list[Action]]:
    """Part a step's actions where one comes again."""
    rounds: list[list[Action]] = [[]]
    for action in actions:
        if action in rounds[-1]:
            rounds.append([])
        rounds[-1].append(action)
    return rounds


def _likes(rounds: Sequence[Sequence[Action]]) -> list[ActionContext]:
    found, done = [], Counter[tuple[ActionKind, int]]()
    stages = sorted({action.stage for action in rounds[0]})
    for actions in rounds:
        what = [(action.kind, stages.index(action.stage)) for action in actions]
        for place, one in enumerate(what):
            found.append(
                ActionContext(
                    *one,
                    is_first=not done[one],
                    done=tuple(min(_SETTLED, done[kind, one[1]]) for kind in get_args(ActionKind)),
                    begins=one not in what[:place],
                    ends=one not in what[place + 1 :],
                    before=tuple(what[max(0, place - 2) : place]),
                    after=tuple(what[place + 1 : place + 2]),
                )
            )
            done[one] += 1
    return found


def _did(like: ActionContext, events: Sequence[TraceEvent], end: Point) -> ActionEffect:
    points = [point for event in events for point in event.points]
    highest = max(points, key=on_device)
    return ActionEffect(like, points[0], end, highest, max(point[-1] for point in points))


def _plus(one: Point, other: Point) -> Point:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Point, other: Point) -> Point:
    return tuple(a - b for a, b in zip(one, other, strict=True))
