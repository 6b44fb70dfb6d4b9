"""Collects what the nodes sampled of themselves, for the page: processor, memory, GPUs, disk.

The samples of one node become a curve for each figure and GPU. Those of several nodes are compared
over equal spans of time, because nodes sample at different times: a point is the mean of a span,
for memory the highest value.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from axonlaunch.diagnostics.report.downsampling import indices_to_keep
from axonlaunch.diagnostics.report.record.run_record import RunRecord, is_time
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
_OF_GPUS: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "gpu_use": ("mean of a node's GPUs", lambda values: sum(values) / len(values)),
    "gpu_memory_bytes": ("fullest GPU of a node", max),
    "gpu_power_w": ("all GPUs of a node", sum),
}
"""One number for the GPUs of a node, by key, with its description."""
_BUCKETS = 200
_BUCKETS_OF_SEVERAL = 50
"""Buckets of a curve of one node among several, whose page has the curves of each."""
_MOST_GPUS = 16
MOST_LINES = 8
"""Number of nodes up to which each has a line; with more, the lines are statistics of all nodes."""
_STATISTICS = ("lowest", "median", "highest")


def system_of(run: RunRecord) -> dict[str, Any] | None:
    """Return the use of the run's nodes by time; None if nothing was sampled.

    Returns:
        ``{"nodes": [host], "absent": number, "views": [{"name", "charts": [{"title", "unit",
        "lines": [{"label", "x", "y"}]}]}]}`` with x in seconds since the first event. ``absent`` is
        the number of nodes whose samples are not in the folder. One node has one view, with a gap
        in its lines between two attempts. Several nodes have a view of all, in which each has a
        line, and a view of each. More than ``MOST_LINES`` have only the view of all, with the
        lowest, median and highest value; lines of the lowest and highest also have ``nodes``, the
        index of the node at each x.
    """
    samples = samples_by_node(run)
    if not samples:
        return None
    first = min(event["time"] for event in run.events or next(iter(samples.values())))
    launches = run.events_of_kind("launched")
    buckets = _BUCKETS if len(samples) == 1 else _BUCKETS_OF_SEVERAL
    views = []
    if len(samples) <= MOST_LINES:
        views = [
            {"name": name, "charts": _charts_of_node([*launches, *events], first, buckets)}
            for name, events in samples.items()
        ]
    if len(samples) > 1:
        views.insert(0, {"name": "all nodes", "charts": _charts_of_nodes(samples, first)})
    return {"nodes": list(samples), "absent": _num_absent(run, len(samples)), "views": views}


def samples_by_node(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of each node in order of time, by a name of the node.

    The name is its host's, with the first rank if several nodes are processes of one host.
    """
    written = {} if run.node_samples is None else run.node_samples.read()
    by_node: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for rank, events in {0: run.events, **written}.items():
        for event in events:
            if event.get("event") == "system" and is_time(event.get("time")):
                by_node[str(event.get("host")), rank].append(event)
    hosts = Counter(host for host, _ in by_node)
    return {
        host if hosts[host] == 1 else f"{host}, rank {rank}": sorted(
            events, key=lambda event: event["time"]
        )
        for (host, rank), events in by_node.items()
    }


def _num_absent(run: RunRecord, found: int) -> int:
    """Return how many nodes of the latest attempt have no samples in the folder."""
    ranks, of_node = run.started.get("world_size"), run.config.get("launch.nproc")
    if not (isinstance(ranks, int) and isinstance(of_node, int) and of_node > 0):
        return 0
    return max(0, ranks // of_node - found)


def _charts_of_node(
    events: Sequence[dict[str, Any]], first: float, buckets: int
) -> list[dict[str, Any]]:
    """Return the charts of one node, from its samples and the launches of the run."""
    events = sorted(events, key=lambda event: event["time"])
    x = [round(event["time"] - first, 1) for event in events]
    charts = []
    for title, unit, names in _CHARTS:
        lines = [
            {"label": label, "x": [x[i] for i in kept], "y": [values[i] for i in kept]}
            for key, name in names.items()
            for label, values in _curves(events, key, name)
            for kept in [indices_to_keep(x, values, buckets=buckets)]
        ]
        if lines:
            charts.append({"title": _with_total(title, events), "unit": unit, "lines": lines})
    return charts


def _charts_of_nodes(
    samples: Mapping[str, Sequence[dict[str, Any]]], first: float
) -> list[dict[str, Any]]:
    """Return the charts of several nodes: one for each figure."""
    every_s = _span_s(list(samples.values()), first)
    events = [event for of_node in samples.values() for event in of_node]
    charts = []
    for title, unit, names in _CHARTS:
        for key, name in names.items():
            by_node = [_spans(of_node, key, first, every_s) for of_node in samples.values()]
            if not any(by_node):
                continue
            heading = _with_total(title, events)
            if len(names) > 1 or key in _OF_GPUS:
                heading += f", {_OF_GPUS[key][0] if key in _OF_GPUS else name}"
            number = _num_complete(by_node)
            x = [round((index + 0.5) * every_s, 1) for index in range(number)]
            point_of = max if unit == "bytes" else statistics.fmean
            lines = _lines(list(samples), by_node, number, point_of)
            charts.append(
                {"title": heading, "unit": unit, "lines": [{**line, "x": x} for line in lines]}
            )
    return charts


def _span_s(samples: Sequence[Sequence[dict[str, Any]]], first: float) -> float:
    """Return the seconds of a point: enough for a sample of each node, and for ``_BUCKETS``."""
    last = max(events[-1]["time"] for events in samples)
    between = [
        statistics.median(later["time"] - earlier["time"] for earlier, later in pairwise(events))
        for events in samples
        if len(events) > 1
    ]
    return max((last - first) / _BUCKETS, 2 * max(between, default=0.0)) or 1.0


def _spans(
    events: Sequence[dict[str, Any]], key: str, first: float, every_s: float
) -> dict[int, list[float]]:
    """Return the numbers of a figure of one node by span of time."""
    spans: dict[int, list[float]] = defaultdict(list)
    for event in events:
        value = event.get(key)
        if isinstance(value, list):
            value = _value_of_gpus(value[:_MOST_GPUS], key)
        number = plain_number(value)
        if number is not None:
            spans[max(0, int((event["time"] - first) / every_s))].append(number)
    return spans


def _value_of_gpus(values: list[Any], key: str) -> Any:
    """Return one value for those of a node's GPUs; of values that are no numbers, any or None."""
    if key not in _OF_GPUS:
        return None
    try:
        return _OF_GPUS[key][1](values)
    except (TypeError, ValueError, ArithmeticError):  # a file that no run wrote
        return None


def _num_complete(by_node: Sequence[Mapping[int, Sequence[float]]]) -> int:
    """Return the number of spans, without the last if it ended before each node was sampled."""
    last = max(max(spans, default=0) for spans in by_node)
    in_last, in_previous = (sum(index in spans for spans in by_node) for index in (last, last - 1))
    return last if in_last < in_previous else last + 1


def _lines(
    nodes: Sequence[str],
    by_node: Sequence[Mapping[int, Sequence[float]]],
    number: int,
    point_of: Callable[[Sequence[float]], float],
) -> Iterator[dict[str, Any]]:
    """Yield a line for each node, or for each of the statistics of many nodes.

    Args:
        nodes: Names of the nodes.
        by_node: Numbers of each node by span of time.
        number: Number of spans.
        point_of: Returns the point of a node from its numbers in a span.
    """
    if len(nodes) <= MOST_LINES:
        for name, spans in zip(nodes, by_node, strict=True):
            points = [point_of(spans[i]) if spans.get(i) else None for i in range(number)]
            yield {"label": name, "y": [_rounded(point) for point in points]}
        return
    rows: dict[str, list[tuple[float | None, int]]] = {name: [] for name in _STATISTICS}
    for i in range(number):
        found = [(node, spans[i]) for node, spans in enumerate(by_node) if spans.get(i)]
        lowest = min(((min(values), node) for node, values in found), default=(None, 0))
        highest = max(((max(values), node) for node, values in found), default=(None, 0))
        means = [point_of(values) for _, values in found]
        median = (statistics.median(means) if means else None, 0)
        for name, point in zip(_STATISTICS, (lowest, median, highest), strict=True):
            rows[name].append(point)
    for name, row in rows.items():
        line: dict[str, Any] = {"label": name, "y": [_rounded(value) for value, _ in row]}
        if name != "median":
            line["nodes"] = [node for _, node in row]
        yield line


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return round(value) if abs(value) >= 1000 else float(f"{value:.3g}")


def _with_total(title: str, events: Sequence[dict[str, Any]]) -> str:
    """Return the title of a chart, for memory with the total of the node if all have the same."""
    if title != "memory":
        return title
    totals = {plain_number(event.get("memory_total_bytes")) for event in events} - {None}
    total = totals.pop() if len(totals) == 1 else None
    return f"memory, of {size(total)}" if total else title


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
