"""Collects a run's predicted, measured and profiled step times, and its pipeline's timelines."""

from __future__ import annotations

import functools
import math
import statistics
from pathlib import Path
from typing import Any

from axonlaunch.config.values.url import is_url
from axonlaunch.diagnostics import step_breakdown
from axonlaunch.diagnostics.pipeline_actions import pipeline_actions
from axonlaunch.diagnostics.report.record.run_record import RunRecord

_MAX_ACTIONS = 4000


def steps_of(run: RunRecord) -> dict[str, Any] | None:
    """Return a run's step times for a page; None without predicted or measured times.

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
        pipelines.append({"name": "predicted round", "actions": predicted.get("pipeline")})
    profiled, actions = _profiled_parts(run, world=_only_axis(run))
    bars += profiled
    pipelines.append({"name": "profiled step", "actions": actions})
    pipelines = [pipeline for pipeline in pipelines if _are_actions(pipeline["actions"])]
    measured = _median_step_s(run)
    if not bars and measured is None:
        return None
    reason = str(predicted.get("reason", ""))
    return {"bars": bars, "measured": measured, "reason": reason, "pipelines": pipelines}


def _median_step_s(run: RunRecord) -> float | None:
    """Return the median of the logged step times, without the first one, which is slower."""
    seconds = [line["step_s"] for line in run.steps[1:] if _is_positive(line.get("step_s"))]
    return statistics.median(seconds) if seconds else None


def _only_axis(run: RunRecord) -> str:
    """Return the mesh axis if only one is larger than 1; otherwise ``world``."""
    mesh = (run.estimate or {}).get("mesh")
    axes = [axis for axis, size in mesh.items() if size != 1] if isinstance(mesh, dict) else []
    return str(axes[0]) if len(axes) == 1 else "world"


def _profiled_parts(run: RunRecord, *, world: str) -> tuple[list[dict[str, Any]], list[Any]]:
    if is_url(str(run.path)):
        return [], []
    paths = step_breakdown.traces(run.path)
    states = tuple((rank, path, *_state(path)) for rank, path in paths.items())
    return _read(states, world)


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=8)
def _read(
    states: tuple[tuple[int, Path, int, int], ...], world: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Read traces, which can take seconds; a live page reads unchanged files only once."""
    bars, traces = [], {}
    for rank, path, _, _ in states:
        try:
            trace = step_breakdown.read_trace(path)
            breakdown = step_breakdown.breakdown(trace, rank=rank, world=world)
        except step_breakdown.UnreadableTraceError:
            continue  # it is being written, or corrupt, which `axonlaunch profile` reports
        traces[rank] = trace
        bars.append(
            {"name": f"rank {rank}, profiled", "parts": breakdown.parts, "step_s": breakdown.step_s}
        )
    return bars, [list(action) for action in pipeline_actions(traces)]


def _are_actions(actions: Any) -> bool:
    return (
        isinstance(actions, list)
        and 0 < len(actions) <= _MAX_ACTIONS
        and all(
            isinstance(action, list)
            and len(action) == 4
            and isinstance(action[0], int)
            and all(isinstance(time, int | float) and math.isfinite(time) for time in action[1:3])
            and isinstance(action[3], str)
            for action in actions
        )
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
