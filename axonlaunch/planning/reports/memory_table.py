"""An estimate as text for a terminal: a table and a stacked bar, a row for each pipeline stage.

It shows what it is given; nothing in it hangs on colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from axonlaunch.planning.records import Estimate, Forecast, HostMemory, RankEstimate
from axonlaunch.system.formatting import UNITS, figures, size, unit_of

if TYPE_CHECKING:
    from axonlaunch.planning.tracing.storage_trace import Category

# By Okabe and Ito, lightened for dark letters; distinguishable in all kinds of colour vision.
CATEGORY_COLOURS: dict[Category, str] = {
    "parameters": "#8fcdf0",
    "gradients": "#f7b955",
    "optimizer": "#f0e442",
    "activations": "#7fdcc0",
    "communication": "#e3a7c8",
    "temporary": "#c4c4c4",
}
_SHORT: dict[Category, str] = {
    "parameters": "params",
    "gradients": "grads",
    "communication": "comm",
}


def stage_name(rank: RankEstimate, estimate: Estimate) -> str:
    """Name the ranks that an entry stands for."""
    return f"pp {rank.coords['pp']}" if estimate.mesh["pp"] > 1 else "all"


def build_memory_table(estimate: Estimate) -> Table:
    """Return a row for each stage: its peak, and what that is made of."""
    unit = unit_of(estimate.peak_bytes)
    drawn = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for name in ("ranks", f"peak {UNITS[unit]}"):
        drawn.add_column(name, justify="left" if name == "ranks" else "right", no_wrap=True)
    for category in CATEGORY_COLOURS:
        drawn.add_column(_SHORT.get(category, category), justify="right", no_wrap=True)
    has_host = any(rank.host_bytes for rank in estimate.ranks)
    if has_host:
        drawn.add_column("host", justify="right", no_wrap=True)
    for rank in estimate.ranks:
        numbers = [rank.peak_bytes, *(rank.breakdown[category] for category in CATEGORY_COLOURS)]
        if has_host:
            numbers.append(rank.host_bytes)
        drawn.add_row(stage_name(rank, estimate), *(figures(number / unit) for number in numbers))
    return drawn


def conclusions(forecast: Forecast) -> Iterator[tuple[str, str, str]]:
    """Yield what follows from an estimate, each as a label, a sentence and a style."""
    known = forecast.estimate
    yield "highest peak", f"{size(known.peak_bytes)} per rank", ""
    if known.process_bytes > known.peak_bytes:
        text = f"{size(known.reserved_bytes)} reserved by torch's allocator, "
        yield "on a GPU", text + f"{size(known.process_bytes)} by the process", ""
        yield "of these", _beside_allocator(forecast), ""
    if read := max(rank.read_bytes for rank in known.ranks):
        yield "weights", f"read with at most {size(read)} of host memory at once per rank", ""
    if forecast.host_memory is not None:
        style = "red" if forecast.host_memory.fits is False else ""
        yield "host memory", of_host(forecast.host_memory), style
    if forecast.memory_bytes is None:
        return
    spare = forecast.memory_bytes - known.process_bytes
    device = f"{forecast.hardware}, {size(forecast.memory_bytes)}: "
    verdict = forecast.verdict
    if verdict is None:
        yield "may fit", f"{device}{size(spare)} are left for the rest", ""
    elif verdict == "fits":
        yield "fits", f"{device}{size(spare)} to spare", "green"
    elif verdict == "tight":
        why = f"less than the {forecast.margin:.0%} by which an estimate may be too low"
        yield "tight", f"{device}{size(spare)} to spare, {why} (estimate.margin)", "yellow"
    elif spare < 0:
        yield "does not fit", f"{device}{size(-spare)} too little", "red"
    else:
        yield "does not fit", "a node has too little host memory for what is offloaded", "red"


def _beside_allocator(forecast: Forecast) -> str:
    """Say what a process holds beside torch's allocator, and where these figures are from."""
    estimate, measured = forecast.estimate, forecast.measured
    parts = {
        "context_mib": ("the driver's context", estimate.context_bytes),
        "communicator_mib": ("NCCL", estimate.communicator_bytes),
    }
    held = {key: f"{size(held)} {of}" for key, (of, held) in parts.items() if held}
    others = [key for key in held if key not in measured]
    own = [f"{text}, as hardware says" for key, text in held.items() if key in measured]
    if not others:
        return "; ".join(own)
    elsewhere = " and ".join(held[key] for key in others)
    keys = ", ".join(f"hardware.{key}" for key in others)
    doubt = f"as on other GPUs: half or twice as much is possible (your own: {keys})"
    return "; ".join([*own, f"{elsewhere}, {doubt}"])


def of_host(memory: HostMemory) -> str:
    """Say what is offloaded, and whether a node has it."""
    text = f"{size(memory.bytes_per_rank)} per rank, {size(memory.bytes_per_node)} per node; "
    if memory.node_bytes is None:
        return text + "hardware.host_memory_gib is not known, so whether a node has it isn't either"
    return text + f"a node has {size(memory.node_bytes)}" + ("" if memory.fits else ": too little")


def bars(estimate: Estimate, *, memory_bytes: int | None, width: int) -> Text:
    """Draw each stage's peak in so many columns, and a device's memory as a line across.

    Args:
        estimate: What to draw.
        memory_bytes: Of a device; None draws no line.
        width: Of the terminal, columns.
    """
    names = [stage_name(rank, estimate) for rank in estimate.ranks]
    head = max(map(len, names)) + 2
    columns = max(width - head - 1, 20)
    whole = max(estimate.peak_bytes, memory_bytes or 0)
    limit = None if memory_bytes is None else round(memory_bytes / whole * columns)
    lines = []
    for name, rank in zip(names, estimate.ranks, strict=True):
        lines.append(Text(f"{name:<{head}}") + _bar(rank, whole / columns, limit))
    return Text("\n").join([*lines, Text(), *_legend(memory_bytes, width)])


def _bar(rank: RankEstimate, unit: float, limit: int | None) -> Text:
    bar = Text()
    total = 0
    for category, colour in CATEGORY_COLOURS.items():
        total += rank.breakdown[category]
        wide = round(total / unit) - len(bar)
        bar.append(_letter(category).ljust(wide, "-")[:wide], f"#000000 on {colour}")
    if limit is None:
        return bar
    if len(bar) <= limit:
        return bar + Text(" " * (limit - len(bar)) + "|")
    return bar[:limit] + Text("|") + bar[limit:]


def _legend(memory_bytes: int | None, width: int) -> list[Text]:
    entries = [
        Text.assemble((f" {_letter(category)} ", f"#000000 on {colour}"), f" {category}")
        for category, colour in CATEGORY_COLOURS.items()
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
