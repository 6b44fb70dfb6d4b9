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
    profiled, actions = _profiled_parts(run, world=_only_axis(run))
    bars += profiled
    pipelines.append({"name": "a step as profiled", "actions": actions})
    pipelines = [pipeline for pipeline in pipelines if _are_actions(pipeline["actions"])]
    measured = _median_step_s(run)
    if not bars and measured is None:
        return None
    reason = str(predicted.get("reason", ""))
    return {"bars": bars, "measured": measured, "reason": reason, "pipelines": pipelines}


def _median_step_s(run: RunRecord) -> float | None:
    """Return the median of the logged step times but the first, which is slower."""
    seconds = [line["step_s"] for line in run.steps[1:] if _is_positive(line.get("step_s"))]
    return statistics.median(seconds) if seconds else None


def _only_axis(run: RunRecord) -> str:
    """Return the axis that all ranks are on, where there is one; else ``world``."""
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
    """Read traces, which takes seconds for some and is done once for a page that is watched."""
    bars, read = [], {}
    for rank, path, _, _ in states:
        try:
            trace = step_breakdown.read_trace(path)
            breakdown = step_breakdown.breakdown(trace, rank=rank, world=world)
        except step_breakdown.UnreadableTraceError:
            continue  # it is being written, or `axonlaunch profile` says what is wrong with it
        read[rank] = trace
        bars.append(
            {"name": f"rank {rank}, profiled", "parts": breakdown.parts, "step_s": breakdown.step_s}
        )
    return bars, [list(action) for action in pipeline_actions(read)]


def _are_actions(actions: Any) -> bool:
    return (
        isinstance(actions, list)
        and 0 < len(actions) <= _MOST_ACTIONS
        and all(
            isinstance(action, list)
            and len(action) == 4
            and isinstance(action[0], int)
            and all(isinstance(at, int | float) and math.isfinite(at) for at in action[1:3])
            and isinstance(action[3], str)
            for action in actions
        )
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
