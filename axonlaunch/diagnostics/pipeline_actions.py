"""Reads the actions of a pipeline's ranks in a profiled step from the ranks' traces.

It imports no torch. Times of all nodes are converted to the clock of the first profiled rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from axonlaunch.diagnostics.step_breakdown import STEP

CLOCK_AHEAD = "axonlaunchClockAheadNanoseconds"
"""Key of a trace: nanoseconds by which its clock is ahead of the first profiled rank's clock."""
_ACTION = re.compile(r"axonlaunch pipeline (\d+[FBIW]\d+)")


def pipeline_actions(
    traces: Mapping[int, Mapping[str, Any]],
) -> list[tuple[int, float, float, str]]:
    """Return the actions of the first profiled step as (rank, start, stop, action).

    Args:
        traces: Traces by profiled rank.

    Returns:
        Times are seconds since the first action. ``2F0`` is stage 2, forward, micro-batch 0. Empty
        without a pipeline.
    """
    actions: list[tuple[int, float, float, str]] = []
    for rank, trace in traces.items():
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        # On a GPU, use the times when kernels ran, not when they were queued.
        on_device = [event for event in events if event.get("cat") == "gpu_user_annotation"]
        named = on_device or [event for event in events if event.get("cat") == "user_annotation"]
        steps = [event for event in named if str(event["name"]).startswith(STEP)]
        if not steps:
            continue
        first = min(steps, key=lambda event: float(event["ts"]))
        end = float(first["ts"]) + float(first["dur"])
        zero = int(trace.get("baseTimeNanoseconds", 0)) - int(trace.get(CLOCK_AHEAD, 0))
        for event in named:
            match = _ACTION.fullmatch(str(event["name"]))
            if match and float(first["ts"]) <= float(event["ts"]) <= end:
                start = zero / 1e9 + float(event["ts"]) / 1e6
                actions.append((rank, start, start + float(event["dur"]) / 1e6, match[1]))
    begin = min((start for _, start, _, _ in actions), default=0.0)
    return sorted((rank, start - begin, stop - begin, name) for rank, start, stop, name in actions)
