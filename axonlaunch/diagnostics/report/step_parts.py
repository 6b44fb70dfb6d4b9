"""Where a run's steps go: as predicted, as measured, as profiled; and a pipeline's timelines."""

from __future__ import annotations

import functools
import math
import statistics
from pathlib import Path
from typing import Any

from axonlaunch.config.url import is_url
from axonlaunch.diagnostics import step_breakdown
from axonlaunch.diagnostics.pipeline_actions import pipeline_actions
from axonlaunch.diagnostics.report.run_record import RunRecord

_MOST_ACTIONS = 4000


def steps_of(run: RunRecord) -> dict[str, Any] | None:
    """Return what a page shows of a run's step time; None where nothing is known.

    Returns:
        ``{"bars": [{"name", "parts", "step_s"}], "measured": seconds or None, "reason": text,
        "pipelines": [{"name", "actions": [[rank, start, stop, action]]}]}``.
    """
    bars: list[dict[str, Any]] = []
    pipelines: list[dict[str, Any]] = []
    predicted = run.step_time or {}
    parts, total = predicted.get("parts"), predicted.get("step_s")
    if isinstance(parts, dict) and _is_positive(total):
        numbers = {str(k): v for k, v in parts.items() if _is_positive(v)}
        name = f"predicted for {predicted.get('hardware')}"
        bars.append({"name": name, "parts": numbers, "step_s": total})
        pipelines.append({"name": "a round as predicted", "actions": predicted.get("pipeline")})
    profiled, actions = _profiled(run)
    bars += profiled
    pipelines.append({"name": "a step as profiled", "actions": actions})
    pipelines = [one for one in pipelines if _are_actions(one["actions"])]
    measured = _measured(run)
    if not bars and measured is None:
        return None
    reason = str(predicted.get("reason", ""))
    return {"bars": bars, "measured": measured, "reason": reason, "pipelines": pipelines}


def _measured(run: RunRecord) -> float | None:
    """Return the median of the logged step times but the first, which is slower."""
    seconds = [line["step_s"] for line in run.steps[1:] if _is_positive(line.get("step_s"))]
    return statistics.median(seconds) if seconds else None


def _profiled(run: RunRecord) -> tuple[list[dict[str, Any]], list[Any]]:
    if is_url(str(run.path)):
        return [], []
    paths = step_breakdown.traces(run.path)
    states = tuple((rank, path, *_state(path)) for rank, path in paths.items())
    return _read(states)


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=8)
def _read(
    states: tuple[tuple[int, Path, int, int], ...],
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Read traces, which takes seconds for some and is done once for a page that is watched."""
    bars, read = [], {}
    for rank, path, _, _ in states:
        try:
            trace = step_breakdown.read_trace(path)
            one = step_breakdown.breakdown(trace, rank=rank, world="world")
        except step_breakdown.UnreadableTraceError:
            continue  # it is being written, or `axonlaunch profile` says what is wrong with it
        read[rank] = trace
        bars.append({"name": f"rank {rank}, profiled", "parts": one.parts, "step_s": one.step_s})
    return bars, [list(action) for action in pipeline_actions(read)]


def _are_actions(found: Any) -> bool:
    return (
        isinstance(found, list)
        and 0 < len(found) <= _MOST_ACTIONS
        and all(
            isinstance(one, list)
            and len(one) == 4
            and isinstance(one[0], int)
            and all(isinstance(at, int | float) and math.isfinite(at) for at in one[1:3])
            and isinstance(one[3], str)
            for one in found
        )
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
