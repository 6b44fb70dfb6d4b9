"""The life of a run: its attempts, what they spent time on beside steps, and goodput.

It reads events and steps that a record holds; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonlaunch.diagnostics.report.run_record import RunRecord


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: attempt, save, evaluation or failure.
        start: Seconds since 1970.
        end: Likewise; the same as ``start`` where only the moment is known.
        text: What to say of it.
    """

    kind: str
    start: float
    end: float
    text: str


def spans(run: RunRecord) -> list[Span]:
    """Return what happened, by its start."""
    attempts = list(_attempts(run))
    for event in run.of_kind("saved"):
        seconds, stalled = _number(event, "seconds"), _number(event, "stalled_s")
        text = f"saved step {event.get('step')} in {seconds:.1f} s, of which training waited "
        attempts.append(
            Span("save", event["time"] - seconds, event["time"], f"{text}{stalled:.1f} s")
        )
    for event in run.of_kind("evaluated"):
        text = f"evaluated after step {event.get('step')}: loss {event.get('eval_loss')}"
        attempts.append(Span("evaluation", event["time"], event["time"], text))
    last = None
    for event in run.of_kind("failed"):
        text = f"rank {event.get('rank')}: {event.get('reason')}"
        if text != last:  # every node says it
            attempts.append(Span("failure", event["time"], event["time"], text))
        last = text
    return sorted(attempts, key=lambda span: span.start)


def step_seconds(run: RunRecord) -> float:
    """Return what the steps that count took: of one that was done twice, the later one."""
    total, before = 0.0, 0
    for line in run.steps:
        total += _number(line, "step_s") * max(0, line["step"] - before)
        before = line["step"]
    return total


def goodput(run: RunRecord) -> float | None:
    """Return the share of wall time, from the first launch to the end, in steps that counted.

    None where the time is not known.
    """
    times = [event["time"] for event in run.events]
    wall = times[-1] - times[0] if times else 0.0
    return min(1.0, step_seconds(run) / wall) if wall > 0 and run.steps else None


def _attempts(run: RunRecord) -> list[Span]:
    """Return from each start of the ranks to what ended them, or to the last that was heard."""
    attempts: list[Span] = []
    began: dict[str, Any] | None = None
    last = 0.0
    for event in run.events:
        kind = event["event"]
        if kind == "started" and began is not None and began["event"] == "launched":
            began = {**event, "time": began["time"]}
        elif kind in ("launched", "started"):
            if began is not None:  # it was killed
                attempts.append(_attempt(began, last))
            began = event
        last = event["time"]
        if began is not None and kind in ("failed", "ended"):
            attempts.append(_attempt(began, last))
            began = None
    if began is not None:
        attempts.append(_attempt(began, last))
    return attempts


def _attempt(began: dict[str, Any], end: float) -> Span:
    ranks, step = began.get("world_size"), began.get("step")
    text = "ended before its ranks were ready" if step is None else f"from step {step}"
    if ranks is not None:
        text += f", {ranks} {'rank' if ranks == 1 else 'ranks'}, {began.get('layout')}"
    return Span("attempt", began["time"], end, text)


def _number(fields: dict[str, Any], key: str) -> float:
    value = fields.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
