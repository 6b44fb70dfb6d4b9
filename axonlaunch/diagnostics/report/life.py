"""The life of a run: its attempts, what they spent time on beside steps, and goodput.

It reads events and steps that a record holds; it decides nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from axonlaunch.diagnostics.lost_peer import failure_reason
from axonlaunch.diagnostics.report.run_record import RunRecord


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: attempt, save, evaluation, failure or node.
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
        text = f"rank {event.get('rank')}: {failure_reason(event)}"
        if text != last:  # every node says it
            attempts.append(Span("failure", event["time"], event["time"], text))
        last = text
    attempts += _changes_of_nodes(run)
    return sorted(attempts, key=lambda span: span.start)


def device_seconds(run: RunRecord) -> float:
    """Return for how long devices were held: of each attempt its duration times its ranks."""
    spans_held = (
        (end - float(began["time"]), _number(began, "world_size"))
        for began, end in _spans_of_starts(run)
    )
    return sum(seconds * ranks for seconds, ranks in spans_held)


def cost(run: RunRecord) -> float | None:
    """Return what a run has cost by ``hardware.price_per_hour``; None without one."""
    price = run.config.get("hardware.price_per_hour")
    if isinstance(price, bool) or not isinstance(price, int | float):
        return None
    amount = price * device_seconds(run) / 3600
    return amount if math.isfinite(amount) else None


def nodes_of_run(run: RunRecord) -> list[str]:
    """Return the host names of the nodes that take part now, or did last."""
    for event in reversed(run.events):
        if event["event"] == "nodes" and isinstance(event.get("hosts"), list):
            return [str(name) for name in event["hosts"]]
        if event["event"] == "launched" and isinstance(event.get("host"), str):
            return [event["host"]]
    return []


def _changes_of_nodes(run: RunRecord) -> Iterator[Span]:
    """Yield which nodes came and left between attempts."""
    before: Counter[str] | None = None
    for event in run.of_kind("nodes"):
        names = event.get("hosts")
        now = Counter(map(str, names)) if isinstance(names, list) else Counter()
        for verb, changed in (("joined", now - (before or now)), ("left", (before or now) - now)):
            for name in changed.elements():
                yield Span("node", event["time"], event["time"], f"{name} {verb}")
        before = now


def step_seconds(run: RunRecord, *, after: int = 0) -> float:
    """Return what the steps that count took: of one that was done twice, the later one.

    Args:
        run: The run.
        after: The step after which they are counted.
    """
    total, before = 0.0, after
    for line in run.steps:
        total += _number(line, "step_s") * max(0, line["step"] - before)
        before = max(before, line["step"])
    return total


def goodput(run: RunRecord) -> float | None:
    """Return the share of wall time, from the first launch to the end, in steps that counted.

    None where the time is not known.
    """
    times = [event["time"] for event in run.events]
    wall = times[-1] - times[0] if times else 0.0
    return min(1.0, step_seconds(run) / wall) if wall > 0 and run.steps else None


def _attempts(run: RunRecord) -> list[Span]:
    return [_attempt(began, end) for began, end in _spans_of_starts(run)]


def _spans_of_starts(run: RunRecord) -> list[tuple[dict[str, Any], float]]:
    """Return each start of the ranks, and when they ended, or were last heard of."""
    attempts: list[tuple[dict[str, Any], float]] = []
    began: dict[str, Any] | None = None
    last = 0.0
    for event in run.events:
        kind = event["event"]
        if kind == "started" and began is not None and began["event"] == "launched":
            began = {**event, "time": began["time"], "ready": event["time"]}
        elif kind in ("launched", "started"):
            if began is not None:  # it was killed
                attempts.append((began, last))
            began = event
        last = event["time"]
        if began is not None and kind in ("failed", "ended"):
            attempts.append((began, last))
            began = None
    if began is not None:
        attempts.append((began, _last_heard(run, began, last)))
    return attempts


def _last_heard(run: RunRecord, began: dict[str, Any], last: float) -> float:
    """Return until when an attempt that said nothing of its end did steps at least."""
    if run.status == "running":
        return max(last, time.time())
    done = step_seconds(run, after=int(_number(began, "step")))
    return max(last, _number(began, "ready") + done)


def _attempt(began: dict[str, Any], end: float) -> Span:
    ranks, step = began.get("world_size"), began.get("step")
    text = "ended before its ranks were ready" if step is None else f"from step {step}"
    if ranks is not None:
        text += f", {ranks} {'rank' if ranks == 1 else 'ranks'}, {began.get('layout')}"
    return Span("attempt", began["time"], end, text)


def _number(fields: dict[str, Any], key: str) -> float:
    value = fields.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
