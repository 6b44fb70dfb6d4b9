"""Prints a header for each run of a sweep and a table that compares their results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.table import Table
from rich.text import Text

from axonlaunch.config import RunConfig
from axonlaunch.config.values.url import shortened
from axonlaunch.system.text.formatting import quantity
from axonlaunch.system.text.terminal import console_on
from axonlaunch.system.text.units import rate_in

_LOSSES = ("eval_loss", "loss")
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


def varied_overrides(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return for each run the overrides that are not common to all runs, as a user writes them."""
    common = set(runs[0]).intersection(*runs[1:])
    return [as_written([word for word in overrides if word not in common]) for overrides in runs]


def as_written(overrides: Sequence[str]) -> str:
    """Return a run's overrides as a user writes them, without the escapes of Hydra's sweeper."""
    return _ESCAPED.sub(r"\1", " ".join(overrides))


def name_of_sweep(configs: Sequence[RunConfig]) -> str:
    """Return the name that resumes a sweep whose runs are ``NAME/0``, ``NAME/1``, ...; else empty.

    Without such numbers, the command names the runs itself and resumes as it is.
    """
    parents = {config.name.rpartition("/")[0] for config in configs}
    numbers = [config.name.rpartition("/")[2] for config in configs]
    is_numbered = numbers == [str(number) for number in range(len(configs))]
    return parents.pop() if is_numbered and len(parents) == 1 else ""


def run_header(variation: str, *, number: int, of: int, is_done: bool) -> str:
    """Return the header of a run that begins or was finished earlier.

    Args:
        variation: Overrides that distinguish the run from the others.
        number: Number of the run, counted from 1.
        of: Number of runs in the sweep.
        is_done: Whether the run was finished by an earlier command.
    """
    return f"run {number} of {of}: {variation}{' (finished before)' if is_done else ''}"


def print_run_header(header: str, *, stream: TextIO) -> None:
    """Print a header from ``run_header``."""
    console_on(stream).print(Text(header, style="bold"), soft_wrap=True)


def print_sweep_table(
    variations: Sequence[str],
    summaries: Sequence[dict[str, Any]],
    *,
    stream: TextIO,
    metric: str = "loss",
    is_highest: bool = False,
) -> None:
    """Print the results of all runs; the best run by ``train.best_metric`` is marked.

    Args:
        variations: Overrides that distinguish each run from the others.
        summaries: Summaries of the runs that were started, in order. The other runs are listed as
            not started.
        metric: ``train.best_metric``: a metric, or loss for the evaluation loss.
        is_highest: Whether the best run has the highest value of the metric.
    """
    metrics = list(dict.fromkeys(name for summary in summaries for name in _metrics(summary)))
    best = _best_run(summaries, metric, is_highest=is_highest)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold")
    rates = [rate_in(summary) for summary in summaries]
    units = list(dict.fromkeys(unit for unit, rate in rates if rate is not None)) or ["tokens"]
    for name in ("loss", "evaluation loss", *metrics, f"{' or '.join(units)}/s"):
        table.add_column(name, justify="right")
    table.add_column("run folder", overflow="fold")
    for label, summary, (unit, rate) in zip(variations, summaries, rates, strict=False):
        speed = "" if rate is None else quantity(rate)
        failed = "" if summary["status"] == "done" else f" ({summary['status']})"
        mark = " (best)" if summary is best and len(summaries) > 1 else ""
        table.add_row(
            label + failed + mark,
            _loss(summary.get("loss")),
            _loss(summary.get("eval_loss")),
            *(_loss(_metrics(summary).get(name)) for name in metrics),
            f"{speed} {unit}" if speed and len(units) > 1 else speed,
            shortened(summary["run_dir"]),
            style="bold" if summary is best else "",
        )
    for label in variations[len(summaries) :]:
        table.add_row(f"{label} (not started)")
    console_on(stream).print(table)


def _metrics(summary: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a run's last evaluation; a run that failed early has none."""
    metrics: dict[str, float | None] = summary.get("metrics") or {}
    return metrics


def _best_run(
    summaries: Sequence[dict[str, Any]], metric: str, *, is_highest: bool
) -> dict[str, Any] | None:
    """Return the run with the best metric, else with the lowest evaluation or training loss."""
    by_metric = [(_metrics(summary).get(metric), summary) for summary in summaries]
    by_losses = [[(summary.get(key), summary) for summary in summaries] for key in _LOSSES]
    for number, pairs in enumerate([by_metric, *by_losses]):
        scored = [(value, summary) for value, summary in pairs if value is not None]
        if scored:
            choose = max if is_highest and not number else min
            return choose(scored, key=lambda pair: pair[0])[1]
    return None


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
