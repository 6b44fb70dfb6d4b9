"""Divides the time of profiled steps into parts, and merges the traces of ranks.

It reads traces of ``torch.profiler`` and imports no torch. Each moment of a step is assigned to the
first of these that is running: matrix product, attention, other kernel, communication; otherwise it
is idle. The parts therefore sum to the step time.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.config.axes import DATA_AXES

PROFILE_FOLDER = "profile"
MERGED = "merged.json.gz"
STEP = "axonlaunch step"
WAIT = "axonlaunch wait"
"""Category of events in which the rank waits for others; their arguments name the axis."""
COMMUNICATION = "exposed communication"
KINDS = ("matrix products", "attention", "other kernels", COMMUNICATION, "idle")

_RANK = re.compile(r"rank_(\d+)\.json\.gz")
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|_attn", re.IGNORECASE)
_PRODUCT = re.compile(
    r"gemm|cutlass|cublas|xmma|nvjet|wgmma|Cijk|triton_\w*mm|^aten::(mm|addmm|bmm|baddbmm|addbmm|"
    r"convolution|_?conv\w*|mkldnn_\w+)$|^mkldnn::",
    re.IGNORECASE,
)
_EXCHANGE = re.compile(r"^nccl|^rccl|ncclDevKernel|^c10d::|^_?c10d_functional::|^gloo:")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class UnreadableTraceError(ValueError):
    """A file is not a valid trace of a profiled rank."""


@dataclass(frozen=True)
class Breakdown:
    """The time of a rank's profiled steps, divided into parts.

    Attributes:
        rank: Rank that was profiled.
        first: First profiled step.
        steps: Number of profiled steps.
        step_s: Mean seconds per step.
        parts: Mean seconds per step of each part; communication is divided by mesh axis.
    """

    rank: int
    first: int
    steps: int
    step_s: float
    parts: dict[str, float]


def traces(folder: Path) -> dict[int, Path]:
    """Return the trace files in a run's folder, by rank."""
    files = (
        (_RANK.fullmatch(path.name), path)
        for path in (folder / PROFILE_FOLDER).glob("rank_*.json.gz")
    )
    return dict(sorted((int(match[1]), path) for match, path in files if match))


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace.

    Raises:
        UnreadableTraceError: The file is corrupt or not a trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            content = json.load(stream)
        if isinstance(content, dict) and isinstance(content.get("traceEvents"), list):
            return content
    except (OSError, ValueError, EOFError) as error:
        raise UnreadableTraceError(f"{path}: can't be read: {error}") from error
    raise UnreadableTraceError(f"{path}: is not a trace of torch.profiler")


def breakdown(content: Mapping[str, Any], *, rank: int, world: str = "world") -> Breakdown:
    """Divide the time of the steps in a trace into parts.

    Args:
        content: Content of the trace.
        rank: Rank that wrote it.
        world: Name for communication in the default group. If one mesh axis contains all ranks,
            pass that axis, because torch uses the default group for it.

    Raises:
        UnreadableTraceError: The trace contains no step.
    """
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if str(event["name"]).startswith(STEP)]
    steps = [event for event in steps if event.get("cat") == "user_annotation"]
    if not steps:
        raise UnreadableTraceError(f"the trace of rank {rank} contains no step of axonlaunch")
    start = min(float(step["ts"]) for step in steps)
    end = max(float(step["ts"]) + float(step["dur"]) for step in steps)
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    if on_device:  # it runs behind the host, and the profiler waits for it at the end
        spans = [*_spans(on_device)]
        end = max(end, max(span[1] for span in spans))
    else:
        spans = [*_innermost(events, thread=(steps[0]["pid"], steps[0]["tid"]))]
    by_kind = {kind: 0.0 for kind in KINDS if kind != COMMUNICATION}
    for kind, seconds in _partition(spans, start, end):
        kind = kind.replace(f"{COMMUNICATION} world", f"{COMMUNICATION} {axis_of(world)}")
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds / len(steps) / 1e6
    first = min(int(str(step["name"]).removeprefix(STEP)) for step in steps)
    return Breakdown(rank, first, len(steps), (end - start) / len(steps) / 1e6, by_kind)


_Span = tuple[float, float, str]


def _spans(events: Iterable[Mapping[str, Any]]) -> Iterator[_Span]:
    for event in events:
        start = float(event["ts"])
        yield start, start + float(event.get("dur", 0)), _kind(event)


def _innermost(events: Sequence[Mapping[str, Any]], *, thread: tuple[Any, Any]) -> Iterator[_Span]:
    """Yield the operations of a host thread; nested ones are cut out of the surrounding ones."""
    operations = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and (event["pid"], event["tid"]) == thread
    ]
    open_: list[list[Any]] = []  # end, kind, and the end of its last nested operation
    for event in sorted(operations, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        yield from _close_spans(open_, start)
        if open_:
            yield open_[-1][2], start, open_[-1][1]
        open_.append([end, _kind(event), start])
    yield from _close_spans(open_, float("inf"))
    yield from _spans(event for event in events if event.get("cat") == WAIT)


def _close_spans(open_: list[list[Any]], until: float) -> Iterator[_Span]:
    while open_ and open_[-1][0] <= until:
        end, kind, covered = open_.pop()
        yield covered, end, kind
        if open_:
            open_[-1][2] = end


def _kind(event: Mapping[str, Any]) -> str:
    name, arguments = str(event["name"]), event.get("args", {})
    if event.get("cat") == WAIT or _EXCHANGE.search(name):
        description = arguments.get("axis") or arguments.get("Process Group Description")
        return f"{COMMUNICATION} {axis_of(str(description or ''))}"
    if _ATTENTION.search(name):
        return "attention"
    return "matrix products" if _PRODUCT.search(name) else "other kernels"


def axis_of(group: str) -> str:
    """Return the mesh axis from torch's description of a group; all data axes are ``dp``."""
    axis = group.removeprefix("mesh_")
    if axis in (*DATA_AXES, "dp"):
        return "dp"
    return axis if axis and axis not in ("default_pg", "undefined") else "world"


def _partition(spans: Iterable[_Span], start: float, end: float) -> Iterator[tuple[str, float]]:
    """Yield (kind, microseconds) for each interval between changes of the running events."""
    changes = sorted(
        change
        for begin, stop, kind in spans
        if stop > start and begin < end and stop > begin
        for change in ((max(begin, start), 1, kind), (min(stop, end), -1, kind))
    )
    running: dict[str, int] = {}
    now = start
    for moment, change, kind in changes:
        if moment > now:
            yield _first_kind(running), moment - now
            now = moment
        running[kind] = running.get(kind, 0) + change
        if not running[kind]:
            del running[kind]  # keeps kinds in the order of their start
    if end > now:
        yield "idle", end - now


def _first_kind(running: Mapping[str, int]) -> str:
    for kind in KINDS[:3]:
        if kind in running:
            return kind
    return next(iter(running), "idle")


def merge(folder: Path, *, offsets_ns: Mapping[int, int]) -> Path:
    """Merge the traces in a run's folder into one file, on the clock of the first rank.

    Args:
        folder: Folder of the run.
        offsets_ns: Nanoseconds by which each rank's clock is ahead of the first rank's clock.

    Returns:
        The merged file, in which each rank has its own processes.
    """
    by_rank = {rank: read_trace(path) for rank, path in traces(folder).items()}
    zero = min(int(content.get("baseTimeNanoseconds", 0)) for content in by_rank.values())
    numbers: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for rank, content in by_rank.items():
        ahead = int(content.get("baseTimeNanoseconds", 0)) - zero - offsets_ns.get(rank, 0)
        for event in content["traceEvents"]:
            key = (rank, str(event.get("pid")))
            number = numbers.setdefault(key, len(numbers) + 1)
            moved = {**event, "pid": number}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) + ahead / 1000
            if "id" in event:
                moved["id"] = f"{rank}/{event['id']}"
            if event.get("name") == "process_name":
                label = event.get("args", {}).get("name", "")
                moved["args"] = {"name": f"rank {rank}: {label}"}
            if event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": number}
            events.append(moved)
    path = folder / PROFILE_FOLDER / MERGED
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as stream:
        json.dump({"traceEvents": events, "baseTimeNanoseconds": zero}, stream)
    return path
