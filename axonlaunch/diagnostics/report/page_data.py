"""Collects the data that the page of runs shows, as one JSON object.

Curves are reduced so that a run of 100,000 steps stays below 2 MB, without losing peaks.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from axonlaunch.config.options.model import title_of
from axonlaunch.config.problems.errors import plain
from axonlaunch.diagnostics.failure_text import failure_place, failure_reason, fold_ranks
from axonlaunch.diagnostics.report.comparison import (
    changed_settings,
    metric_title,
    rate_of,
    results,
    run_table,
    with_units,
)
from axonlaunch.diagnostics.report.coordinates import coordinates_of
from axonlaunch.diagnostics.report.downsampling import indices_to_keep
from axonlaunch.diagnostics.report.record.run_record import RunRecord
from axonlaunch.diagnostics.report.record.run_timeline import (
    cost,
    device_seconds,
    nodes_of_run,
    spans,
    step_seconds,
)
from axonlaunch.diagnostics.report.record.wall_time import wall_time
from axonlaunch.diagnostics.report.step_parts import steps_of
from axonlaunch.diagnostics.report.system_figures import system_of
from axonlaunch.system.storage.strict_json import plain_number
from axonlaunch.system.text.formatting import size
from axonlaunch.system.text.units import Counted

_BUCKETS = 800
"""Buckets of a curve with up to four points each, which is more than the pixels of a screen."""
_COLUMNS = 400
"""Maximum number of columns in the map of ranks, and of points in the progress table."""
_DIGITS = 7
_OF_TITLE = ("name", "path", "target")
"""Keys of the group ``model`` that its title is made from."""
CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    **{f"{unit}_per_s": f"{unit}/s" for unit in get_args(Counted)},
    "mfu": "model FLOP/s utilization (MFU)",
    "expert_load": "expert load (largest / mean)",
    "step_s": "step time (s)",
    "peak_memory_bytes": "peak memory",
}
"""Keys of ``metrics.jsonl`` that are drawn, with the titles of their charts."""


def page_data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the data of a page.

    Args:
        runs: One or more runs, drawn in the same charts.
    """
    return {
        "curves": {
            **CURVES,
            "peak_memory_bytes": f"peak memory {_owner_of_memory(runs)}",
            **{key: metric_title(key) for run in runs for key in run.metrics},
        },
        "counted": " or ".join(dict.fromkeys(run.unit for run in runs)),
        "runs": [_run_data(run, label) for run, label in zip(runs, labels(runs), strict=True)],
        "table": _table(runs) if len(runs) > 1 else None,
        "coordinates": coordinates_of(runs) if len(runs) > 1 else None,
        "configurations": changed_settings(runs) if len(runs) > 1 else [],
        "results": with_units(results(runs)) if len(runs) > 1 else [],
    }


def _peak_memory(run: RunRecord) -> str | None:
    peak = plain_number(run.steps[-1].get("peak_memory_bytes")) if run.steps else None
    return None if peak is None else f"{size(peak)} {_owner_of_memory([run])}"


def _owner_of_memory(runs: Sequence[RunRecord]) -> str:
    """Return the owner of ``peak_memory_bytes``: the process on a CPU, tensors on a GPU."""
    is_cpu = {run.started.get("device") == "cpu" for run in runs}
    if len(is_cpu) > 1:
        return "(of the process on a CPU, of tensors on a GPU)"
    return "of the main rank's process" if is_cpu.pop() else "of the main rank's tensors"


def _table(runs: Sequence[RunRecord]) -> dict[str, Any]:
    head, rows = run_table(runs, labels(runs))
    return {"head": head, "rows": [asdict(row) for row in rows]}


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return a label for each run: its name, or its path if several runs have the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.path) for run in runs]


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return the facts at the top of a run's page, as names and texts."""
    started, summary = run.started, run.summary
    launched: dict[str, Any] = next(iter(reversed(run.events_of_kind("launched"))), {})
    counted = sum(_counts(run))
    versions = started.get("versions")
    last = run.steps[-1] if run.steps else {}
    rows: list[tuple[str, Any]] = [
        ("status", run.status),
        ("step", f"{last.get('step', 0):,} of {run.config.get('train.steps', '?')}"),
        ("loss", _short(last.get("loss"))),
        ("evaluation loss", _short(run.evaluations[-1]["eval_loss"]) if run.evaluations else None),
        *((metric_title(key), _short(run.evaluations[-1].get(key))) for key in run.metrics),
        ("layout", started.get("layout")),
        ("ranks", started.get("world_size")),
        ("model", title_of({key: run.config.get(f"model.{key}") for key in _OF_TITLE})),
        ("parameters", _thousands(started.get("parameters"))),
        ("data", run.config.get("data.name")),
        ("optimizer", run.config.get("optimizer.name")),
        ("learning rate", _text(run.config.get("optimizer.lr"))),
        ("global batch", _text(run.config.get("train.global_batch_size"))),
        ("precision", run.config.get("train.precision")),
        ("device", started.get("device")),
        ("nodes", ", ".join(nodes_of_run(run))),
        ("started", _moment(run.events[0]["time"]) if run.events else None),
        ("in steps", _duration(step_seconds(run))),
        (run.unit, _thousands(counted)),
        (f"{run.unit}/s", _thousands(rate_of(run))),
        ("peak memory", _peak_memory(run)),
        ("cost", _cost(run)),
        ("goodput", _goodput(run)),
        ("predicted goodput", _predicted_goodput(summary.get("goodput"))),
        ("proof", _proof(summary.get("proof"))),
        (
            "versions",
            ", ".join(f"{k} {v}" for k, v in versions.items())
            if isinstance(versions, dict)
            else None,
        ),
        ("commit", launched.get("commit")),
        ("folder", str(run.path)),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _text(value: Any) -> str | None:
    return None if value is None else plain(value)


def _run_data(run: RunRecord, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "status": run.status,
        "facts": facts(run),
        "series": _series(run),
        "progress": _progress(run),
        "memory": _memory(run),
        "steps": steps_of(run),
        "ranks": _ranks(run),
        "experts": _experts(run),
        "system": system_of(run),
        "life": [
            {"kind": span.kind, "start": span.start, "end": span.end, "text": span.text}
            for span in spans(run)
        ],
        "crash": _crash(run),
        "notes": _notes(run),
        "config": [
            [key, plain(value), str(run.origins.get(key, ""))] for key, value in run.config.items()
        ],
    }


def _notes(run: RunRecord) -> list[str]:
    samples = [] if run.node_samples is None else run.node_samples.notes
    events = run.events_of_kind("noted")
    return [*run.notes, *samples, *(str(event.get("text")) for event in events)]


def _series(run: RunRecord) -> dict[str, list[list[float | None]]]:
    """Return ``{key: [steps, values]}`` for each curve that the run has."""
    series: dict[str, list[list[float | None]]] = {}
    for key in CURVES:
        if any(key in line for line in run.steps):
            series[key] = _thinned(run.steps, key)
    if run.evaluations:
        series["eval_loss"] = _thinned(run.evaluations, "eval_loss")
    for key in run.metrics:
        series[key] = _thinned(run.evaluations, key)
    return series


def _thinned(lines: Sequence[dict[str, Any]], key: str) -> list[list[float | None]]:
    x = [line["step"] for line in lines]
    y = [plain_number(line.get(key)) for line in lines]
    indices = indices_to_keep(x, y, buckets=_BUCKETS)
    return [[x[i] for i in indices], [_rounded(y[i]) for i in indices]]


def _progress(run: RunRecord) -> list[list[float]]:
    """Return steps with the total targets and seconds up to each; used by the other x axes."""
    steps, targets, seconds = [float(run.first_step)], [0.0], [0.0]
    for line, counted in zip(run.steps, _counts(run), strict=True):
        done = max(0, line["step"] - steps[-1])
        steps.append(line["step"])
        targets.append(targets[-1] + counted)
        seconds.append(seconds[-1] + (plain_number(line.get("step_s")) or 0.0) * done)
    every = max(1, len(steps) // _COLUMNS)
    chosen = sorted({*range(0, len(steps), every), len(steps) - 1})
    return [[_rounded(row[i]) or 0.0 for i in chosen] for row in (steps, targets, seconds)]


def _counts(run: RunRecord) -> list[float]:
    """Return the number of targets between logged steps, assuming equal counts in all steps."""
    counts, previous = [], run.first_step
    for line in run.steps:
        count = plain_number(line.get(run.unit)) or 0.0
        counts.append(count * max(0, line["step"] - previous))
        previous = line["step"]
    return counts


def _memory(run: RunRecord) -> dict[str, Any] | None:
    """Return the estimated memory of each distinct rank, and the measured peak."""
    ranks = run.estimate.get("ranks") if run.estimate else None
    measured = plain_number(run.summary.get("measured_peak_bytes"))
    if not isinstance(ranks, list):
        return None if measured is None else {"measured": measured, "ranks": []}
    rows = []
    for rank in ranks:
        breakdown = rank.get("breakdown") if isinstance(rank, dict) else None
        if isinstance(breakdown, dict):
            numbers = {str(name): plain_number(number) or 0.0 for name, number in breakdown.items()}
            coords = rank.get("coords")
            items = coords.items() if isinstance(coords, dict) else []
            position = " ".join(f"{axis}={index}" for axis, index in items if index)
            name = f"rank {rank.get('rank')}" + (f" ({position})" if position else "")
            rows.append(
                {"name": name, "parts": numbers, "peak": plain_number(rank.get("peak_bytes"))}
            )
    return {"measured": measured, "ranks": rows}


def _ranks(run: RunRecord) -> dict[str, Any] | None:
    """Return the percentage of time that each rank worked, by step; None if not measured."""
    events = run.events_of_kind("rank_times")
    every = math.ceil(len(events) / _COLUMNS) or 1
    lines = [event for event in reversed(events[::-every]) if _are_shares(event)]
    if not lines:
        return None
    number = len(lines[-1]["compute"])
    lines = [line for line in lines if len(line["compute"]) == number]
    hosts = lines[-1].get("hosts")
    return {
        "steps": [line["step"] for line in lines],
        "hosts": hosts if isinstance(hosts, list) else [],
        "worked": [
            [
                round(100 * min(1.0, max(0.0, data + compute)))
                for data, compute in zip(line["data"], line["compute"], strict=True)
            ]
            for line in lines
        ],
    }


def _experts(run: RunRecord) -> dict[str, Any] | None:
    """Return the load of the fullest expert of each block, by step; None without experts."""
    loads = [(line["step"], line.get("expert_loads")) for line in run.steps]
    lines = [(step, row) for step, row in loads if isinstance(row, dict) and row]
    if not lines:
        return None
    every = math.ceil(len(lines) / _COLUMNS)
    lines = list(reversed(lines[::-every]))
    blocks = list(lines[-1][1])
    return {
        "steps": [step for step, _ in lines],
        "blocks": blocks,
        "loads": [
            [_rounded(plain_number(row.get(block))) or 1.0 for block in blocks] for _, row in lines
        ],
    }


def _are_shares(event: dict[str, Any]) -> bool:
    compute, data = event.get("compute"), event.get("data")
    return (
        isinstance(event.get("step"), int)
        and isinstance(compute, list)
        and isinstance(data, list)
        and len(compute) == len(data) > 0
        and all(isinstance(share, int | float) for share in (*compute, *data))
    )


def _crash(run: RunRecord) -> dict[str, Any] | None:
    if run.crash is None:
        return None
    keys = ("rank", "world_size", "traceback", "hint")
    coords, followers = run.crash.get("coords"), run.crash.get("followers")
    reason = str(failure_reason(run.crash))
    later = [
        (follower["rank"], str(follower.get("reason")))
        for follower in (followers if isinstance(followers, list) else [])
        if isinstance(follower, dict) and isinstance(follower.get("rank"), int)
    ]
    return {key: run.crash.get(key) for key in keys} | {
        "reason": reason,
        "place": failure_place(run.crash, coords if isinstance(coords, dict) else {}),
        "followers": fold_ranks(later, first=reason),
    }


def _cost(run: RunRecord) -> str | None:
    amount, price = cost(run), run.config.get("hardware.price_per_hour")
    if amount is None:
        return None
    return f"{amount:,.2f} ({device_seconds(run) / 3600:,.2f} device hours at {price:g})"


def _goodput(run: RunRecord) -> str | None:
    """Return the fraction of wall time in productive steps, and the other parts of it."""
    parts = wall_time(run)
    if parts is None:
        return None
    others = {
        "saving": parts.saving_s,
        "lost": parts.lost_s,
        "restarting": parts.restarting_s,
        "start, evaluation and rest": parts.other_s,
    }
    shares = [
        f"{seconds / parts.total_s:.1%} {name}" for name, seconds in others.items() if seconds
    ]
    text = f"{parts.goodput:.1%} of wall time was spent in training steps"
    return f"{text} ({', '.join(shares)})" if shares else text


def _predicted_goodput(goodput: Any) -> str | None:
    """Return the goodput that the figures of the hardware predict, and its error."""
    if not isinstance(goodput, dict):
        return None
    share, predicted = (plain_number(goodput.get(key)) for key in ("share", "predicted_share"))
    if share is None or predicted is None:
        return None
    both = [goodput.get("predicted_s"), goodput.get("measured_s")]
    parts = [
        f"{key} {seconds[0]:,.3g} s instead of {seconds[1]:,.3g} s"
        for key in ("saving", "lost", "restarting")
        if None not in (seconds := [_part(part, key) for part in both])
    ]
    return f"{predicted:.1%}, {100 * (predicted - share):+.1f} points: {', '.join(parts)}"


def _part(parts: Any, key: str) -> float | None:
    return plain_number(parts.get(key)) if isinstance(parts, dict) else None


def _proof(proof: Any) -> str | None:
    if not isinstance(proof, dict):
        return None
    return ", ".join(f"{key} {value}" for key, value in proof.items() if value not in (None, ""))


def _rounded(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _short(value: Any) -> str | None:
    number = plain_number(value)
    return None if number is None else f"{number:.4f}"


def _thousands(value: Any) -> str | None:
    number = plain_number(value)
    return None if number is None else f"{round(number):,}"


def _duration(seconds: float) -> str:
    try:
        return str(datetime.timedelta(seconds=round(seconds)))
    except OverflowError:  # more than a billion days, or infinite
        return f"{seconds:.3g} s"


def _moment(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
