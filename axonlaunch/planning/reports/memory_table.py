"""Formats an estimate for a terminal, as a table and stacked bars with a row per pipeline stage.

The output is readable without colors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from axonlaunch.planning.records import (
    Estimate,
    Forecast,
    HostMemory,
    RankEstimate,
    RoutingForecast,
)
from axonlaunch.system.text.formatting import UNITS, figures, size, unit_of

if TYPE_CHECKING:
    from axonlaunch.planning.tracing.storage_trace import Category

# Palette of Okabe and Ito, lightened for dark letters; suitable for color-blind readers.
CATEGORY_COLORS: dict[Category, str] = {
    "parameters": "#8fcdf0",
    "gradients": "#f7b955",
    "optimizer": "#f0e442",
    "activations": "#7fdcc0",
    "communication": "#e3a7c8",
    "temporary": "#c4c4c4",
}
_SHORT_NAMES: dict[Category, str] = {
    "parameters": "params",
    "gradients": "grads",
    "communication": "comm",
}
_GAP = 2
"""Spaces between columns."""


def stage_name(rank: RankEstimate, estimate: Estimate) -> str:
    """Return the name of the ranks that an entry represents."""
    return f"pp {rank.coords['pp']}" if estimate.mesh["pp"] > 1 else "all"


def build_memory_tables(estimate: Estimate, *, width: int) -> list[Table]:
    """Return the peak of each stage and its breakdown, in as many tables as the width requires.

    Args:
        estimate: Estimate to show.
        width: Width of the terminal in columns. Columns that do not fit are in the next table,
            which names the stages again.
    """
    unit, ranks = unit_of(estimate.peak_bytes), estimate.ranks
    numbers = {f"peak {UNITS[unit]}": [rank.peak_bytes for rank in ranks]}
    for category in CATEGORY_COLORS:
        name = _SHORT_NAMES.get(category, category)
        numbers[name] = [rank.breakdown[category] for rank in ranks]
    if any(rank.host_bytes for rank in ranks):
        numbers["host"] = [rank.host_bytes for rank in ranks]
    columns = {
        name: [figures(number / unit) for number in values] for name, values in numbers.items()
    }
    stages = [stage_name(rank, estimate) for rank in ranks]
    return [
        _table({"ranks": stages, **{name: columns[name] for name in group}})
        for group in _groups_that_fit(columns, width - _column_width("ranks", stages))
    ]


def _groups_that_fit(columns: Mapping[str, list[str]], width: int) -> list[list[str]]:
    """Divide columns into groups that fit into a width, each with a gap in front."""
    groups: list[list[str]] = [[]]
    left = width
    for name, cells in columns.items():
        needed = _GAP + _column_width(name, cells)
        if needed > left and groups[-1]:
            groups.append([])
            left = width
        groups[-1].append(name)
        left -= needed
    return groups


def _column_width(name: str, cells: list[str]) -> int:
    return max(map(len, [name, *cells]))


def _table(columns: Mapping[str, list[str]]) -> Table:
    """Return a table with the stages on the left and numbers on the right."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP // 2))
    for name in columns:
        table.add_column(name, justify="left" if name == "ranks" else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def build_routing_table(forecast: Forecast) -> Table:
    """Return a table with a row for each load of the rank whose experts get the most tokens."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for name, justify in (("routing", "left"), ("tokens", "right"), ("peak", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("process", justify="right", no_wrap=True)
    table.add_column("")  # the only one that may be wrapped
    for routed in forecast.routings:
        load = "all that can" if routed.load is None else f"{routed.load:g} x balanced"
        table.add_row(
            routed.routing,
            load,
            size(routed.estimate.peak_bytes),
            size(routed.estimate.process_bytes),
            _routing_verdict(routed, forecast),
        )
    return table


def _routing_verdict(routed: RoutingForecast, forecast: Forecast) -> Text:
    if routed.verdict is None or forecast.memory_bytes is None:
        return Text("")
    limit = forecast.memory_bytes / (1 + forecast.margin)
    missing = size(round(routed.estimate.process_bytes - limit))
    if routed.verdict == "fits":
        return Text("fits", style="green")
    style = "yellow" if routed.verdict == "tight" else "red"
    word = routed.verdict.replace("_", " ")
    return Text(f"{word}: {missing} more than fits with the margin", style=style)


def conclusions(forecast: Forecast) -> Iterator[tuple[str, str, str]]:
    """Yield the conclusions of an estimate, each as a label, a text and a style."""
    estimate = forecast.estimate
    yield "highest peak", f"{size(estimate.peak_bytes)} per rank", ""
    if estimate.process_bytes > estimate.peak_bytes:
        text = f"{size(estimate.reserved_bytes)} reserved by torch's allocator, "
        yield "on a GPU", text + f"{size(estimate.process_bytes)} by the process", ""
        yield "includes", _outside_allocator(forecast), ""
    if read := max(rank.read_bytes for rank in estimate.ranks):
        yield "weights", f"read with at most {size(read)} of host memory at once per rank", ""
    if forecast.host_memory is not None:
        style = "red" if forecast.host_memory.fits is False else ""
        yield "host memory", host_memory_text(forecast.host_memory), style
    if forecast.memory_bytes is None:
        return
    spare = forecast.memory_bytes - estimate.process_bytes
    device = f"{forecast.hardware}, {size(forecast.memory_bytes)}: "
    verdict = forecast.verdict
    if verdict is None:
        yield "may fit", f"{device}{size(spare)} left for activations, messages and temporaries", ""
    elif verdict == "fits":
        yield "fits", f"{device}{size(spare)} to spare", "green"
    elif verdict == "tight":
        why = f"less than the {forecast.margin:.0%} by which an estimate may be too low"
        yield "tight", f"{device}{size(spare)} to spare, {why} (estimate.margin)", "yellow"
    elif spare < 0:
        yield "does not fit", f"{device}{size(-spare)} too little", "red"
    else:
        yield "does not fit", "a node has too little host memory for the offloaded tensors", "red"


def _outside_allocator(forecast: Forecast) -> str:
    """Describe the memory of a process outside torch's allocator, and the source of the figures."""
    estimate, measured = forecast.estimate, forecast.measured
    parts = {
        "context_mib": ("the CUDA context", estimate.context_bytes),
        "communicator_mib": ("NCCL", estimate.communicator_bytes),
    }
    texts = {key: f"{size(count)} for {owner}" for key, (owner, count) in parts.items() if count}
    typical_keys = [key for key in texts if key not in measured]
    from_hardware = [f"{text} (from hardware)" for key, text in texts.items() if key in measured]
    if not typical_keys:
        return "; ".join(from_hardware)
    typical = " and ".join(texts[key] for key in typical_keys)
    keys = " and ".join(f"hardware.{key}" for key in typical_keys)
    advice = f"(typical figures, can be off by 2x; set {keys} to your measurements)"
    return "; ".join([*from_hardware, f"{typical} {advice}"])


def host_memory_text(memory: HostMemory) -> str:
    """Describe the host memory of a run and of a node."""
    text = f"{size(memory.bytes_per_rank)} per rank, {size(memory.bytes_per_node)} per node; "
    if memory.node_bytes is None:
        return text + "hardware.host_memory_gib is not set, so whether it fits is unknown"
    return text + f"a node has {size(memory.node_bytes)}" + ("" if memory.fits else ": too little")


def bars(estimate: Estimate, *, memory_bytes: int | None, width: int) -> Text:
    """Draw the peak of each stage as a bar, and the memory of a device as a vertical line.

    Args:
        estimate: Estimate to draw.
        memory_bytes: Memory of a device in bytes; None draws no line.
        width: Width of the terminal in columns.
    """
    names = [stage_name(rank, estimate) for rank in estimate.ranks]
    head = max(map(len, names)) + 2
    columns = max(width - head - 1, 20)
    total_bytes = max(estimate.peak_bytes, memory_bytes or 0)
    limit = None if memory_bytes is None else round(memory_bytes / total_bytes * columns)
    lines = []
    for name, rank in zip(names, estimate.ranks, strict=True):
        lines.append(Text(f"{name:<{head}}") + _bar(rank, total_bytes / columns, limit))
    return Text("\n").join([*lines, Text(), *_legend(memory_bytes, width)])


def _bar(rank: RankEstimate, unit: float, limit: int | None) -> Text:
    bar = Text()
    total = 0
    for category, color in CATEGORY_COLORS.items():
        total += rank.breakdown[category]
        width = round(total / unit) - len(bar)
        bar.append(_letter(category).ljust(width, "-")[:width], f"#000000 on {color}")
    if limit is None:
        return bar
    if len(bar) <= limit:
        return bar + Text(" " * (limit - len(bar)) + "|")
    return bar[:limit] + Text("|") + bar[limit:]


def _legend(memory_bytes: int | None, width: int) -> list[Text]:
    entries = [
        Text.assemble((f" {_letter(category)} ", f"#000000 on {color}"), f" {category}")
        for category, color in CATEGORY_COLORS.items()
    ]
    if memory_bytes is not None:
        entries.append(Text(f" |  {size(memory_bytes)}"))
    lines = [entries[0]]
    for word in entries[1:]:
        if len(lines[-1]) + len(word) + 2 <= width:
            lines[-1] = Text("  ").join([lines[-1], word])
        else:
            lines.append(word)
    return lines


def _letter(category: Category) -> str:
    return category[0].upper()
