"""Collects what the main rank sampled of its node, for the page: processor, memory, GPUs, disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from axonlaunch.diagnostics.report.downsampling import indices_to_keep
from axonlaunch.diagnostics.report.record.run_record import RunRecord
from axonlaunch.system.storage.strict_json import plain_number
from axonlaunch.system.text.formatting import size

_CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("processor", "share", {"cpu": "share of all cores"}),
    ("memory", "bytes", {"memory_bytes": "in use"}),
    ("GPU use", "share", {"gpu_use": "GPU"}),
    ("GPU memory", "bytes", {"gpu_memory_bytes": "GPU"}),
    ("GPU power", "watts", {"gpu_power_w": "GPU"}),
    (
        "disk",
        "bytes/s",
        {"disk_read_bytes_per_s": "read", "disk_written_bytes_per_s": "written"},
    ),
    ("network", "bytes/s", {"received_bytes_per_s": "received", "sent_bytes_per_s": "sent"}),
)
"""Title and unit of each chart, and the names of its curves by key of an event."""
_BUCKETS = 200
_MOST_GPUS = 16


def system_of(run: RunRecord) -> dict[str, Any] | None:
    """Return the use of the main rank's node by time; None if nothing was sampled.

    Returns:
        ``{"host": text, "charts": [{"title", "unit", "lines": [{"label", "x", "y"}]}]}`` with x in
        seconds since the first event. Between two attempts a line has a gap.
    """
    events = [e for e in run.events if e["event"] in ("system", "launched")]
    events.sort(key=lambda event: event["time"])
    samples = [event for event in events if event["event"] == "system"]
    if not samples:
        return None
    first = min(event["time"] for event in run.events)
    x = [round(event["time"] - first, 1) for event in events]
    charts = []
    for title, unit, names in _CHARTS:
        lines = [
            {"label": label, "x": [x[i] for i in kept], "y": [values[i] for i in kept]}
            for key, name in names.items()
            for label, values in _curves(events, key, name)
            for kept in [indices_to_keep(x, values, buckets=_BUCKETS)]
        ]
        if lines:
            charts.append({"title": title, "unit": unit, "lines": lines})
    total = plain_number(samples[-1].get("memory_total_bytes"))
    for chart in charts:
        if chart["title"] == "memory" and total:
            chart["title"] = f"memory, of {size(total)}"
    return {"host": str(samples[-1].get("host")), "charts": charts}


def _curves(
    events: Sequence[dict[str, Any]], key: str, name: str
) -> list[tuple[str, list[float | None]]]:
    """Return the label and values of each curve of a key: one, or one for each GPU."""
    values = [event.get(key) for event in events]
    number = max((len(value) for value in values if isinstance(value, list)), default=0)
    if not number:
        numbers = [plain_number(value) for value in values]
        return [(name, numbers)] if any(each is not None for each in numbers) else []
    rows = [value if isinstance(value, list) else [] for value in values]
    return [
        (f"{name} {index}", [plain_number(next(islice(row, index, None), None)) for row in rows])
        for index in range(min(number, _MOST_GPUS))
    ]
