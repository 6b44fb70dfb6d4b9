"""Estimates a long step of a long pipeline from a short step of a short one, action by action.

What a rank's action changes, and what it holds beside what stood before it, depends on what it does
and on its neighbours in the schedule, not on how many micro-batches wait. So every action of the
long step is given the effect of the most similar one of the short step. Receive buffers differ with
a schedule's neighbours, so the result is exact to about one activation between stages.

An example, the first of 2 ranks under 1f1b, in MiB of activations. Traced with 4 micro-batches:

    action   F0    F1    B0    F2    B1    F3    B2    B3
    start    0     10    20    10    20    10    20    10
    end      10    20    10    20    10    20    10    0

Of 64 forwards, F0 and F1 stand for the first two, F3 for the last, F2 for all others: like it they
come after a backward. Of 64 backwards, B0 stands for the first, B3 for the last. Each adds what it
added in the short step, +10 or -10, to where the action before has ended.
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

    def similarity(self, other: ActionContext) -> tuple[int, ...]:
        """Return how far both agree, what matters most first; the larger the more similar."""
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

    context: ActionContext
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
        def begin_and_run(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            trace.begin(f"{_ACTION} {kind_of(kwargs)} {self.stage_index} {chunk}")
            return run(self, chunk, *args, **kwargs)

        setattr(stage, name, begin_and_run)

    receive("_prepare_forward_infra", source=-1, here="activations")
    receive("_prepare_backward_infra", source=1, here="temporary")
    begin("forward_one_chunk", lambda _: "F")
    begin("backward_one_chunk", lambda kwargs: "B" if kwargs.get("full_backward", True) else "I")
    begin("backward_weight_one_chunk", lambda _: "W")


def extend_schedule(
    events: Sequence[TraceEvent], *, rounds: Sequence[Sequence[Action]]
) -> list[TraceEvent]:
    """Return what a step of more actions holds.

    Args:
        events: Of a step that did each kind of action at least three times a round, watched by
            ``watch_actions``.
        rounds: What the rank does in each round of the longer step.

    Returns:
        An event before the first action, one of each action, and those after the last.
    """
    actions = {n: action for n, event in enumerate(events) if (action := _action(event))}
    starts, update = [*actions], _first_update(events)
    effects = [
        _effect(context, events[start:stop], events[stop].points[0])
        for context, (start, stop) in zip(
            _contexts(_in_rounds([*actions.values()])),
            itertools.pairwise([*starts, update]),
            strict=True,
        )
    ]
    longer = [*events[: starts[0]]]
    now = effects[0].start
    for context in _contexts(rounds):
        effect = _most_similar(effects, context)
        shift = _minus(now, effect.start)
        event = TraceEvent((_ACTION,), [_plus(effect.highest, shift)])
        # The host's most and the device's are not of one moment.
        event.points.append((*effect.start[:-1], effect.host + shift[-1]))
        longer.append(event)
        now = _plus(effect.end, shift)
    shift = _minus(now, events[update].points[0])
    return longer + [shifted(event, shift) for event in events[update:]]


def _most_similar(effects: Sequence[ActionEffect], context: ActionContext) -> ActionEffect:
    """Return the effect of the action in the most similar context.

    Of equals the one that leaves least: a buffer kept once isn't kept for each micro-batch.
    """
    return max(effects, key=lambda effect: (context.similarity(effect.context), -effect.left))


def left_by_forward(events: Sequence[TraceEvent]) -> dict[int, int]:
    """Return what a micro-batch's forward leaves for its backward, in bytes.

    Args:
        events: Of a step that was watched by ``watch_actions``.

    Returns:
        ``{stage: bytes of activations}``, of the last forward of each: first ones may make what
        all share.
    """
    activations = CATEGORIES.index("activations")
    starts = [n for n, event in enumerate(events) if _action(event) is not None]
    left = {}
    for start, stop in itertools.pairwise([*starts, _first_update(events)]):
        action = _action(events[start])
        assert action is not None
        if action.kind == "F":
            end, begin = events[stop].points[0], events[start].points[0]
            left[action.stage] = end[activations] - begin[activations]
    return left


def shifted(event: TraceEvent, shift: Point) -> TraceEvent:
    """Return an event with more, or less, held all along."""
    return TraceEvent(event.name, [_plus(point, shift) for point in event.points])


def _first_update(events: Sequence[TraceEvent]) -> int:
    return next(n for n, event in enumerate(events) if event.name[0] == "update")


def _action(event: TraceEvent) -> Action | None:
    what, *fields = str(event.name[0]).split()
    if what != _ACTION:
        return None
    kind: Any = fields[0]
    return Action(kind, int(fields[1]), int(fields[2]))


def _in_rounds(actions: Sequence[Action]) -> list[list[Action]]:
    """Part a step's actions where one comes again."""
    rounds: list[list[Action]] = [[]]
    for action in actions:
        if action in rounds[-1]:
            rounds.append([])
        rounds[-1].append(action)
    return rounds


def _contexts(rounds: Sequence[Sequence[Action]]) -> list[ActionContext]:
    """Return the context of each action of a step."""
    contexts, done = [], Counter[tuple[ActionKind, int]]()
    stages = sorted({action.stage for action in rounds[0]})
    for actions in rounds:
        steps = [(action.kind, stages.index(action.stage)) for action in actions]
        for place, (kind, stage) in enumerate(steps):
            before, after = steps[:place], steps[place + 1 :]
            contexts.append(
                ActionContext(
                    kind,
                    stage,
                    is_first=not done[kind, stage],
                    done=tuple(min(_SETTLED, done[other, stage]) for other in get_args(ActionKind)),
                    begins=(kind, stage) not in before,
                    ends=(kind, stage) not in after,
                    before=tuple(before[-2:]),
                    after=tuple(after[:1]),
                )
            )
            done[kind, stage] += 1
    return contexts


def _effect(context: ActionContext, events: Sequence[TraceEvent], end: Point) -> ActionEffect:
    points = [point for event in events for point in event.points]
    highest = max(points, key=on_device)
    return ActionEffect(context, points[0], end, highest, max(point[-1] for point in points))


def _plus(a: Point, b: Point) -> Point:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Point, b: Point) -> Point:
    return tuple(x - y for x, y in zip(a, b, strict=True))
