"""Renders a run for a terminal: its figures, a curve of its loss, and a bar for each rank."""

from __future__ import annotations

import statistics
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
_ROWS = 20
"""Rows of the screen with one node; those that are left can show more nodes."""
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
        shown += _nodes(run["system"], most=size.height - _ROWS)
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
    if all(value is None for value in values):
        return Text("no values yet", style="dim")
    if height < 2:
        return Text("the terminal has too few rows for a curve", style="dim")
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


def _nodes(system: dict[str, Any], *, most: int) -> list[RenderableType]:
    """Return the latest sample of each node in a line, or the extremes of more than ``most``."""
    nodes, views = system["nodes"], system["views"]
    if len(nodes) == 1 or (len(views) > 1 and len(nodes) <= most):
        return [_node(view) for view in views if view["name"] in nodes]
    texts = [f"{len(nodes)} nodes"]
    for chart in views[0]["charts"]:
        name = chart["title"].partition(",")[0]
        if unit := _NODE.get(name):
            texts.append(f"{name} {_extremes(nodes, chart['lines'], unit)}")
    return [Text(text, style="dim", no_wrap=True, overflow="ellipsis") for text in texts]


def _extremes(nodes: Sequence[str], lines: Sequence[dict[str, Any]], unit: str) -> str:
    """Return the lowest, median and highest of the latest values, with the nodes of the extremes.

    Args:
        nodes: Names of the nodes.
        lines: Lines of a chart of all nodes.
        unit: Unit of the chart.
    """
    rows = list(zip(*(line["y"] for line in lines), strict=True))
    complete = [at for at, row in enumerate(rows) if None not in row]
    if not complete:  # a node has left, or has not been sampled yet
        return "--"
    at = complete[-1]
    if "nodes" in lines[0]:
        named = [(rows[at][n], nodes[lines[n]["nodes"][at]]) for n in (0, 2)]
        middle = rows[at][1]
    else:
        labels = (line["label"] for line in lines)
        named = sorted(zip(rows[at], labels, strict=True))
        middle = statistics.median(rows[at])
    (low, lowest), (high, highest) = named[0], named[-1]
    texts = (_in_unit(low, unit), lowest, _in_unit(high, unit), highest, _in_unit(middle, unit))
    return "{} on {} to {} on {}, median {}".format(*texts)


def _node(view: dict[str, Any]) -> Text:
    """Return the latest sample of a node in one line."""
    texts = [f"node {view['name']}"]
    for chart in view["charts"]:
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
