"""Computes a run's timeline and its cost from its recorded events and steps.

The timeline contains attempts, saves, evaluations, failures and changes of nodes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from axonlaunch.diagnostics.failure_text import failure_reason
from axonlaunch.diagnostics.report.record.run_record import RunRecord


@dataclass(frozen=True)
class Span:
    """An entry of a timeline.

    Attributes:
        kind: attempt, save, evaluation, failure or node.
        start: Start in seconds since 1970.
        end: End in seconds since 1970; equals ``start`` if the duration is unknown.
        text: Description for the user.
    """

    kind: str
    start: float
    end: float
    text: str


def spans(run: RunRecord) -> list[Span]:
    """Return the timeline of a run, in order of start."""
    timeline = list(_attempts(run))
    for event in run.events_of_kind("saved"):
        seconds, stalled = number_of(event, "seconds"), number_of(event, "stalled_s")
        text = f"saved step {event.get('step')} in {seconds:.1f} s; training waited {stalled:.1f} s"
        timeline.append(Span("save", event["time"] - seconds, event["time"], text))
    for event in run.events_of_kind("evaluated"):
        text = f"evaluated after step {event.get('step')}: loss {event.get('eval_loss')}"
        timeline.append(Span("evaluation", event["time"], event["time"], text))
    last = None
    for event in run.events_of_kind("failed"):
        text = f"rank {event.get('rank')}: {failure_reason(event)}"
        if text != last:  # every node reports the failure
            timeline.append(Span("failure", event["time"], event["time"], text))
        last = text
    timeline += _changes_of_nodes(run)
    return sorted(timeline, key=lambda span: span.start)


def device_seconds(run: RunRecord) -> float:
    """Return the device seconds of a run: the sum of duration times ranks over all attempts."""
    attempts = (
        (end - float(began["time"]), number_of(began, "world_size"))
        for began, end in attempts_with_ends(run)
    )
    return sum(seconds * ranks for seconds, ranks in attempts)


def cost(run: RunRecord) -> float | None:
    """Return the cost of a run, from ``hardware.price_per_hour``; None if no price is set."""
    price = run.config.get("hardware.price_per_hour")
    if isinstance(price, bool) or not isinstance(price, int | float):
        return None
    amount = price * device_seconds(run) / 3600
    return amount if math.isfinite(amount) else None


def nodes_of_run(run: RunRecord) -> list[str]:
    """Return the host names of the nodes that take part now, or took part last."""
    for event in reversed(run.events):
        if event["event"] == "nodes" and isinstance(event.get("hosts"), list):
            return [str(name) for name in event["hosts"]]
        if event["event"] == "launched" and isinstance(event.get("host"), str):
            return [event["host"]]
    return []


def _changes_of_nodes(run: RunRecord) -> Iterator[Span]:
    """Yield the nodes that joined and left between attempts."""
    previous: Counter[str] | None = None
    for event in run.events_of_kind("nodes"):
        names = event.get("hosts")
        now = Counter(map(str, names)) if isinstance(names, list) else Counter()
        joined, left = now - (previous or now), (previous or now) - now
        for verb, changed in (("joined", joined), ("left", left)):
            for name in changed.elements():
                yield Span("node", event["time"], event["time"], f"{name} {verb}")
        previous = now


def step_seconds(run: RunRecord, *, after: int | None = None) -> float:
    """Return the seconds spent in training steps; a repeated step counts only the last time.

    Args:
        run: Record of the run.
        after: Only steps after this one count; None for the step from which the run began.
    """
    total, previous = 0.0, run.first_step if after is None else after
    for line in run.steps:
        total += number_of(line, "step_s") * max(0, line["step"] - previous)
        previous = max(previous, line["step"])
    return total


def _attempts(run: RunRecord) -> list[Span]:
    return [_attempt(began, end) for began, end in attempts_with_ends(run)]


def attempts_with_ends(run: RunRecord) -> list[tuple[dict[str, Any], float]]:
    """Return the start event of each attempt, and the time of its end or of its last event."""
    attempts: list[tuple[dict[str, Any], float]] = []
    began: dict[str, Any] | None = None
    last = 0.0
    for event in run.events:
        kind = event["event"]
        if kind == "started" and began is not None and began["event"] == "launched":
            began = {**event, "time": began["time"], "ready": event["time"]}
        elif kind in ("launched", "started"):
            if began is not None:  # the previous attempt was killed
                attempts.append((began, last))
            began = event
        last = event["time"]
        if began is not None and kind in ("failed", "ended"):
            attempts.append((began, last))
            began = None
    if began is not None:
        attempts.append((began, _last_activity(run, began, last)))
    return attempts


def _last_activity(run: RunRecord, began: dict[str, Any], last: float) -> float:
    """Return the last known time of an attempt that recorded no end."""
    if run.status == "running":
        return max(last, time.time())
    done = step_seconds(run, after=int(number_of(began, "step")))
    return max(last, number_of(began, "ready") + done)


def _attempt(began: dict[str, Any], end: float) -> Span:
    ranks, step = began.get("world_size"), began.get("step")
    text = "ended before its ranks were ready" if step is None else f"from step {step}"
    if ranks is not None:
        text += f", {ranks} {'rank' if ranks == 1 else 'ranks'}, {began.get('layout')}"
    return Span("attempt", began["time"], end, text)


def number_of(fields: dict[str, Any], key: str) -> float:
    """Return a number of an event; 0 if it is missing or of another type."""
    value = fields.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
