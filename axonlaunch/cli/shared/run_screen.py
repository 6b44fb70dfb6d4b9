"""Renders a run for a terminal: its figures, a curve of its loss, and a bar for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_SHOWN_FACTS = ("step", "loss", "evaluation loss", "layout", "in steps", "goodput")
_STYLES = {"running": "cyan", "done": "green", "interrupted": "yellow"}


def screen_of(run: dict[str, Any], size: ConsoleDimensions) -> RenderableType:
    """Return a run for a terminal of this size.

    Args:
        run: One of the runs in the result of ``page_data``.
        size: Columns and rows of the terminal.
    """
    style = _STYLES.get(run["status"], "red")
    shown: list[RenderableType] = [
        Text.assemble((run["label"], "bold"), "  ", (run["status"], style)),
        _facts(run),
    ]
    # Reserve rows for headings, the label of the axis and the cursor's line.
    left = size.height - len(_rows(run)) - 8
    if "loss" in run["series"]:
        steps, values = run["series"]["loss"]
        ranks = run["ranks"]
        bars = min(len(ranks["worked"][0]), left // 2) if ranks else 0
        shown += [Text("\nloss", style="bold"), curve(steps, values, size.width - 12, left - bars)]
        if ranks:
            shown += [Text("\nshare of time that each rank worked", style="bold")]
            shown += _bars(ranks, bars, size.width - 30)
    if run["crash"]:
        shown.append(Text(f"\nrank {run['crash']['rank']}: {run['crash']['reason']}", style="red"))
    return Group(*shown)


def curve(
    steps: Sequence[float], values: Sequence[float | None], width: int, height: int
) -> RenderableType:
    """Return a curve of block characters. Each column shows the mean of a range of steps.

    Args:
        steps: Step of each value, ascending.
        values: Values; None is left out of the means.
        width: Number of columns.
        height: Number of lines of the curve.
    """
    columns = _columns(steps, values, max(10, width))
    finite = [value for value in columns if value is not None]
    if not finite or height < 2:
        return Text("no values yet", style="dim")
    low, high = min(finite), max(finite)
    if low == high:
        low -= 1.0  # draws a line at the top
    span = high - low
    eighths = [
        None if value is None else 1 + round((value - low) / span * (8 * height - 1))
        for value in columns
    ]
    rows = []
    for row in reversed(range(height)):
        filled = [0 if level is None else min(8, max(0, level - 8 * row)) for level in eighths]
        edge = {height - 1: high, 0: low}.get(row)
        label = f"{edge:>9.4g} " if edge is not None else " " * 10
        rows.append(Text(label, style="dim") + Text("".join(_BLOCKS[n] for n in filled), "cyan"))
    return Group(*rows, Text(f"{'':10}step {steps[0]:,} to {steps[-1]:,}", style="dim"))


def _columns(
    steps: Sequence[float], values: Sequence[float | None], width: int
) -> list[float | None]:
    """Return the mean of the values in each column; empty columns repeat the previous mean."""
    bins: list[list[float]] = [[] for _ in range(width)]
    step_range = (steps[-1] - steps[0]) or 1
    for step, value in zip(steps, values, strict=True):
        if value is not None:
            bins[min(width - 1, int((step - steps[0]) / step_range * width))].append(value)
    columns: list[float | None] = []
    for column in bins:
        previous = columns[-1] if columns else None
        columns.append(sum(column) / len(column) if column else previous)
    return columns


def _facts(run: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(run):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _rows(run: dict[str, Any]) -> list[tuple[str, str]]:
    facts = run["facts"]
    return [(name, value) for name, value in facts if name in _SHOWN_FACTS or name.endswith("/s")]


def _bars(ranks: dict[str, Any], count: int, width: int) -> list[RenderableType]:
    """Return a bar for each of the ``count`` ranks that worked most, in the order of ranks."""
    latest = ranks["worked"][-1]
    order = sorted(range(len(latest)), key=lambda rank: -latest[rank])[:count]
    hosts = ranks["hosts"]
    return [
        Text(f"rank {rank:<5}", style="dim")
        + Text("█" * max(0, round(latest[rank] / 100 * max(10, width))), style="blue")
        + Text(f" {latest[rank]}% {hosts[rank] if rank < len(hosts) else ''}")
        for rank in sorted(order)
    ]
