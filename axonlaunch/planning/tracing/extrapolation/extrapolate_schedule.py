"""Extrapolates a pipeline step with many actions from a traced step with few actions.

An action changes the memory of its rank by an amount that depends on the action and on its
neighbors in the schedule, but not on the number of waiting micro-batches. So each action of the
long step gets the effect of the most similar action of the short step. Receive buffers depend on
the neighbors in the schedule, so the error is about one activation between stages.

An example: the first of 2 ranks under 1f1b, in MiB of activations. Traced with 4 micro-batches:

    action   F0    F1    B0    F2    B1    F3    B2    B3
    start    0     10    20    10    20    10    20    10
    end      10    20    10    20    10    20    10    0

In a step with 64 micro-batches, F0 and F1 represent the first two forwards, F3 the last one, and F2
all others, because they also follow a backward. B0 represents the first backward, B3 the last. Each
action changes the end of the previous action by the same amount as in the short step, +10 or -10.
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
_MAX_COUNT = 3
"""Maximum of ``ActionContext.counts``; later repetitions of an action behave alike.

The first backward creates gradients. The second may convert them to another type, which frees the
old ones after that.
"""


@dataclass(frozen=True)
class ActionContext:
    """Position of an action in the schedule, used to find a similar one.

    Attributes:
        kind: Kind of the action.
        stage: Index of its stage among the rank's stages, from 0.
        is_first: Whether it is the first of its kind and stage in the step.
        counts: Number of earlier actions of each kind on the stage, at most ``_MAX_COUNT``.
        is_first_in_round: Whether it is the first of its kind and stage in the round.
        is_last_in_round: Whether it is the last of its kind and stage in the round.
        previous: Kind and stage of the two previous actions, nearest last.
        next: Kind and stage of the next action; empty for the last action.
    """

    kind: ActionKind
    stage: int
    is_first: bool
    counts: tuple[int, ...]
    is_first_in_round: bool
    is_last_in_round: bool
    previous: tuple[tuple[ActionKind, int], ...]
    next: tuple[tuple[ActionKind, int], ...]

    def similarity(self, other: ActionContext) -> tuple[int, ...]:
        """Return a sort key, larger for more similar contexts; important criteria come first."""
        return (
            (self.kind, self.stage) == (other.kind, other.stage),
            self.is_last_in_round == other.is_last_in_round,
            self.is_first == other.is_first,
            self.previous[-1:] == other.previous[-1:],
            -sum(abs(a - b) for a, b in zip(self.counts, other.counts, strict=True)),
            self.next == other.next,
            self.previous == other.previous,
            self.is_first_in_round == other.is_first_in_round,
        )


@dataclass(frozen=True)
class ActionEffect:
    """Memory effect of an action of the short step.

    Attributes:
        context: Position of the action in the schedule.
        start: Bytes before the action.
        end: Bytes after the action.
        peak: Point with the most device memory during the action.
        host: Peak of host memory during the action, in bytes.
    """

    context: ActionContext
    start: Point
    end: Point
    peak: Point
    host: int

    @property
    def remaining(self) -> int:
        """Bytes of device memory that the action leaves allocated."""
        return on_device(self.end) - on_device(self.start)


def watch_actions(trace: StorageTrace) -> None:
    """Begin a new event of the trace whenever the rank's pipeline begins an action.

    This patches torch's pipeline stages permanently, so call it in a process forked for it.
    """
    stage: Any = pipelining.PipelineStage

    def categorize_buffers(method: str, *, source: int, local_category: Category) -> None:
        """Set the category of a stage's receive buffers.

        If the neighboring stage is on the same rank, its tensors replace the buffers: with 8
        micro-batches, 8 outputs of the previous stage instead of 8 messages.
        """
        prepare = getattr(stage, method)

        @functools.wraps(prepare)
        def make_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:
            neighbor = self.stage_index_to_group_rank.get(self.stage_index + source)
            with trace.during(local_category if neighbor == self.group_rank else "communication"):
                return prepare(self, *args, **kwargs)

        setattr(stage, method, make_buffers)

    def watch(method: str, kind_of: Any) -> None:
        run = getattr(stage, method)

        @functools.wraps(run)
        def begin_and_run(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            trace.begin(f"{_ACTION} {kind_of(kwargs)} {self.stage_index} {chunk}")
            return run(self, chunk, *args, **kwargs)

        setattr(stage, method, begin_and_run)

    categorize_buffers("_prepare_forward_infra", source=-1, local_category="activations")
    categorize_buffers("_prepare_backward_infra", source=1, local_category="temporary")
    watch("forward_one_chunk", lambda _: "F")
    watch("backward_one_chunk", lambda kwargs: "B" if kwargs.get("full_backward", True) else "I")
    watch("backward_weight_one_chunk", lambda _: "W")


def extend_schedule(
    events: Sequence[TraceEvent], *, rounds: Sequence[Sequence[Action]]
) -> list[TraceEvent]:
    """Return the events of a step with more actions.

    Args:
        events: Events of a step traced with ``watch_actions``. Each kind of action must run at
            least three times per round.
        rounds: Actions of the rank in each round of the longer step.

    Returns:
        Events before the first action, one event per action, and events after the last action.
    """
    actions = {n: action for n, event in enumerate(events) if (action := _action(event))}
    action_starts, update = [*actions], _first_update(events)
    effects = [
        _effect(context, events[start:stop], events[stop].points[0])
        for context, (start, stop) in zip(
            _contexts(_in_rounds([*actions.values()])),
            itertools.pairwise([*action_starts, update]),
            strict=True,
        )
    ]
    extended = [*events[: action_starts[0]]]
    current = effects[0].start
    for context in _contexts(rounds):
        effect = _most_similar(effects, context)
        shift = _minus(current, effect.start)
        event = TraceEvent((_ACTION,), [_plus(effect.peak, shift)])
        # The peaks of host and device memory are at different moments.
        event.points.append((*effect.start[:-1], effect.host + shift[-1]))
        extended.append(event)
        current = _plus(effect.end, shift)
    shift = _minus(current, events[update].points[0])
    return extended + [shifted(event, shift) for event in events[update:]]


def _most_similar(effects: Sequence[ActionEffect], context: ActionContext) -> ActionEffect:
    """Return the effect of the action with the most similar context.

    Among equals, return the one that leaves the least memory allocated, because a buffer that is
    kept once must not be counted for each micro-batch.
    """
    return max(effects, key=lambda effect: (context.similarity(effect.context), -effect.remaining))


def left_by_forward(events: Sequence[TraceEvent]) -> dict[int, int]:
    """Return the activations that the forward of one micro-batch keeps for backward, in bytes.

    Args:
        events: Events of a step traced with ``watch_actions``.

    Returns:
        ``{stage: bytes of activations}``, measured on the last forward of each stage, because the
        first forward may create storages that all micro-batches share.
    """
    activations = CATEGORIES.index("activations")
    starts = [n for n, event in enumerate(events) if _action(event) is not None]
    remaining = {}
    for start, stop in itertools.pairwise([*starts, _first_update(events)]):
        action = _action(events[start])
        assert action is not None
        if action.kind == "F":
            end, begin = events[stop].points[0], events[start].points[0]
            remaining[action.stage] = end[activations] - begin[activations]
    return remaining


def shifted(event: TraceEvent, shift: Point) -> TraceEvent:
    """Return a copy of an event with ``shift`` added to every point."""
    return TraceEvent(event.name, [_plus(point, shift) for point in event.points])


def _first_update(events: Sequence[TraceEvent]) -> int:
    return next(n for n, event in enumerate(events) if event.name[0] == "update")


def _action(event: TraceEvent) -> Action | None:
    label, *fields = str(event.name[0]).split()
    if label != _ACTION:
        return None
    kind: Any = fields[0]
    return Action(kind, int(fields[1]), int(fields[2]))


def _in_rounds(actions: Sequence[Action]) -> list[list[Action]]:
    """Split the actions of a step into rounds: a repeated action begins a new round."""
    rounds: list[list[Action]] = [[]]
    for action in actions:
        if action in rounds[-1]:
            rounds.append([])
        rounds[-1].append(action)
    return rounds


def _contexts(rounds: Sequence[Sequence[Action]]) -> list[ActionContext]:
    """Return the context of each action of a step."""
    contexts, counts = [], Counter[tuple[ActionKind, int]]()
    stages = sorted({action.stage for action in rounds[0]})
    for actions in rounds:
        steps = [(action.kind, stages.index(action.stage)) for action in actions]
        for position, (kind, stage) in enumerate(steps):
            previous, following = steps[:position], steps[position + 1 :]
            contexts.append(
                ActionContext(
                    kind,
                    stage,
                    is_first=not counts[kind, stage],
                    counts=tuple(
                        min(_MAX_COUNT, counts[other, stage]) for other in get_args(ActionKind)
                    ),
                    is_first_in_round=(kind, stage) not in previous,
                    is_last_in_round=(kind, stage) not in following,
                    previous=tuple(previous[-2:]),
                    next=tuple(following[:1]),
                )
            )
            counts[kind, stage] += 1
    return contexts


def _effect(context: ActionContext, events: Sequence[TraceEvent], end: Point) -> ActionEffect:
    points = [point for event in events for point in event.points]
    peak = max(points, key=on_device)
    return ActionEffect(context, points[0], end, peak, max(point[-1] for point in points))


def _plus(a: Point, b: Point) -> Point:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Point, b: Point) -> Point:
    return tuple(x - y for x, y in zip(a, b, strict=True))
