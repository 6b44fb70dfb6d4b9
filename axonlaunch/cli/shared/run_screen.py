"""Renders a run for a terminal: its figures, a curve of its loss, and a bar for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from axonlaunch.cli.shared.braille import braille_line
from axonlaunch.system.text.formatting import size as size_text

_LEFT = ("step", "loss", "evaluation loss", "in steps", "goodput")
_RIGHT = ("layout", "peak memory")
"""Facts in the two columns of figures; the speed follows those on the right."""
_LABEL = 10
"""Characters of the labels at the left of a curve."""
_NODE = {"processor": "share", "memory": "bytes", "GPU use": "share", "GPU power": "watts"}
_STYLES = {"running": "cyan", "done": "green", "interrupted": "yellow"}


def screen_of(run: dict[str, Any], size: ConsoleDimensions) -> RenderableType:
    """Return a run for a terminal of this size.

    Args:
        run: One of the runs in the result of ``page_data``.
        size: Columns and rows of the terminal.
    """
    style = _STYLES.get(run["status"], "red")
    figures = _figures(run["facts"])
    shown: list[RenderableType] = [
        Text.assemble((run["label"], "bold"), "  ", (run["status"], style)),
        figures,
    ]
    if run["system"]:
        shown.append(_node(run["system"]))
    # Reserve rows for headings, the label of the axis and the cursor's line.
    left = size.height - figures.row_count - len(shown) - 6
    if "loss" in run["series"]:
        steps, values = run["series"]["loss"]
        ranks = run["ranks"]
        bars = min(len(ranks["worked"][0]), left // 2) if ranks else 0
        shown += [Text("\nloss", style="bold"), curve(steps, values, size.width, left - bars)]
        if ranks:
            shown += [Text("\nshare of time that each rank worked", style="bold")]
            shown += _bars(ranks, bars, size.width - 30)
    if run["crash"]:
        shown.append(Text(f"\nrank {run['crash']['rank']}: {run['crash']['reason']}", style="red"))
    return Group(*shown)


def curve(
    steps: Sequence[float], values: Sequence[float | None], width: int, height: int
) -> RenderableType:
    """Return a curve by step, with its highest and lowest value on the left.

    Args:
        steps: Ascending steps, one or more.
        values: One value for each step; None leaves a gap.
        width: Characters in a row, with labels.
        height: Rows, without the labels of steps.
    """
    if height < 2 or all(value is None for value in values):
        return Text("no values yet", style="dim")
    rows, low, high = braille_line(steps, values, width=max(10, width - _LABEL - 1), height=height)
    edges = {0: high, height - 1: low}
    shown = [
        Text(f"{f'{edges[row]:.4g}' if row in edges else '':>{_LABEL}} ", style="dim")
        + Text(text, "cyan")
        for row, text in enumerate(rows)
    ]
    first, last = f"step {steps[0]:,}", f"{steps[-1]:,}"
    between = " " * max(1, len(rows[0]) - len(first) - len(last))
    return Group(*shown, Text(f"{'':{_LABEL + 1}}{first}{between}{last}", style="dim"))


def _figures(facts: Sequence[tuple[str, str]]) -> Table:
    """Return the most important facts in two columns of names and values."""
    values = dict(facts)
    speeds = [name for name in values if name.endswith("/s")]
    rows = zip_longest(
        *(
            [(name, values[name]) for name in names if name in values]
            for names in (_LEFT, [*_RIGHT, *speeds])
        ),
        fillvalue=("", ""),
    )
    table = Table.grid(padding=(0, 2))
    for left, right in rows:
        texts = (left[0], left[1].partition(" of wall")[0], *right)
        table.add_row(*(Text(text, style="" if n % 2 else "dim") for n, text in enumerate(texts)))
    return table


def _node(system: dict[str, Any]) -> Text:
    """Return the latest sample of the main rank's node in one line."""
    texts = [f"node {system['host']}"]
    for chart in system["charts"]:
        name, of, total = chart["title"].partition(", of ")
        if unit := _NODE.get(name):
            latest = [line["y"][-1] for line in chart["lines"] if line["y"][-1] is not None]
            values = " ".join(_in_unit(value, unit) for value in latest)
            texts.append(f"{name} {values}{' of ' if of else ''}{total}")
    return Text("   ".join(texts), style="dim", no_wrap=True, overflow="ellipsis")


def _in_unit(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.0%}"
    return size_text(value) if unit == "bytes" else f"{value:.0f} W"


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
