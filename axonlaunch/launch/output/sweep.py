"""Prints a header for each run of a sweep and a table that compares their results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.table import Table
from rich.text import Text

from axonlaunch.config import RunConfig
from axonlaunch.launch.output.console import shortened
from axonlaunch.system.text.formatting import quantity
from axonlaunch.system.text.terminal import console_on
from axonlaunch.system.text.units import rate_in

_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


def varied_overrides(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return for each run the overrides that are not common to all runs, as a user writes them."""
    common = set(runs[0]).intersection(*runs[1:])
    return [as_written([word for word in overrides if word not in common]) for overrides in runs]


def as_written(overrides: Sequence[str]) -> str:
    """Return a run's overrides as a user writes them, without the escapes of Hydra's sweeper."""
    return _ESCAPED.sub(r"\1", " ".join(overrides))


def again(configs: Sequence[RunConfig]) -> str:
    """Return the text to append to a sweep's command so that it resumes."""
    parents = {config.name.rpartition("/")[0] for config in configs}
    numbers = [config.name.rpartition("/")[2] for config in configs]
    is_numbered = numbers == [str(number) for number in range(len(configs))]
    return f" with name={parents.pop()}" if is_numbered and len(parents) == 1 else ""


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
    variations: Sequence[str], summaries: Sequence[dict[str, Any]], *, stream: TextIO
) -> None:
    """Print the results of all runs; the run with the lowest loss is printed in bold.

    Args:
        variations: Overrides that distinguish each run from the others.
        summaries: Summaries of the runs that were started, in order. The other runs are listed as
            not started.
        stream: Output stream.
    """
    compared = (
        "eval_loss"
        if any(summary.get("eval_loss") is not None for summary in summaries)
        else "loss"
    )
    losses = [summary[compared] for summary in summaries if summary.get(compared) is not None]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold")
    rates = [rate_in(summary) for summary in summaries]
    units = list(dict.fromkeys(unit for unit, rate in rates if rate is not None)) or ["tokens"]
    for name in ("loss", "evaluation loss", f"{' or '.join(units)}/s"):
        table.add_column(name, justify="right")
    table.add_column("run folder", overflow="fold")
    for label, summary, (unit, rate) in zip(variations, summaries, rates, strict=False):
        speed = "" if rate is None else quantity(rate)
        is_best = summary.get(compared) is not None and summary[compared] == min(losses)
        failed = "" if summary["status"] == "done" else f" ({summary['status']})"
        table.add_row(
            label + failed,
            _loss(summary.get("loss")),
            _loss(summary.get("eval_loss")),
            f"{speed} {unit}" if speed and len(units) > 1 else speed,
            shortened(summary["run_dir"]),
            style="bold" if is_best else "",
        )
    for label in variations[len(summaries) :]:
        table.add_row(f"{label} (not started)")
    console_on(stream).print(table)


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
