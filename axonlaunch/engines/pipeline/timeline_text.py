"""Draws a pipeline's timeline as text: one row per rank, with time to the right.

A timeline wider than the terminal is cut, with a note. ``timeline_plot`` draws figures.
"""

from __future__ import annotations

import textwrap

from rich.text import Text

from axonlaunch.engines.pipeline.schedule import ActionKind
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats, Timeline, TimelineSlot

# Colors by Okabe and Ito, distinguishable with all common forms of color vision: for a rank's
# first stage and for its later ones. rich maps them to the terminal's palette.
ACTION_STYLES: dict[ActionKind, tuple[str, str]] = {
    "F": ("#000000 on #56b4e9", "#ffffff on #0072b2"),
    "B": ("#000000 on #f5a623", "#ffffff on #b05000"),
    "I": ("#000000 on #f0e442", "#000000 on #b8a800"),
    "W": ("#000000 on #33c39a", "#ffffff on #00694d"),
}
MEANINGS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}
MAX_TEXT_COLUMNS = 6  # columns of the shortest action; a larger number would only stretch the text


def text_timeline(timeline: Timeline, *, width: int) -> Text:
    """Draw a timeline and its legend in ``width`` columns.

    A cell shows an action and its micro-batch; its width is proportional to the action's duration.
    Lower-case letters mark a rank's second and later stages, so the text is readable without
    color.
    """
    schedule = timeline.schedule
    label_width = len(f"rank {schedule.degree - 1}") + 2
    available = max(width - label_width, 12)
    unit, total_columns = _scale(timeline, available=available)
    shown = min(total_columns, available)
    lines = [Text(" " * label_width) + _ruler(shown, unit)]
    for rank in range(schedule.degree):
        slots = [slot for slot in timeline.slots if slot.rank == rank]
        first = schedule.stages_of(rank)[0]
        lines.append(Text(f"{f'rank {rank}':<{label_width}}") + _row(slots, first, shown, unit))
    lines.append(Text())
    if shown < total_columns:
        lines[-1] = Text(
            f"cut: {shown / unit:.4g} of {timeline.span:.4g} shown; "
            f"{label_width + total_columns} columns or --plot show all\n",
            style="yellow",
        )
    return Text("\n").join([*lines, *_legend(timeline)])


def text_stats(stats: PipelineMemoryStats, *, width: int) -> str:
    """Format a schedule's idle time and live activations, wrapped to ``width`` columns."""
    live = " ".join(f"{stage}:{count}" for stage, count in enumerate(stats.live_activations))
    rows = {"bubble": f"{stats.bubble_fraction:.1%} of all ranks' time", "activations": live}
    notes = {"bubble": "", "activations": " (stage:micro-batches held at most)"}
    return "\n".join(
        textwrap.fill(f"{name:<13}{row}{notes[name]}", max(width, 30), subsequent_indent=" " * 13)
        for name, row in rows.items()
    )


def _scale(timeline: Timeline, *, available: int) -> tuple[float, int]:
    """Return the columns per unit of time and for the whole timeline, at a legible scale."""
    shortest = min(slot.stop - slot.start for slot in timeline.slots)
    legible = 1 + len(str(timeline.schedule.microbatches - 1))
    fitting = int(available * shortest / timeline.span + 1e-9)
    unit = min(max(fitting, legible), max(MAX_TEXT_COLUMNS, legible)) / shortest
    return unit, round(timeline.span * unit)


def _ruler(shown: int, unit: float) -> Text:
    """Label time about every ten columns, at round numbers."""
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if n * unit >= 8)
    marks = ""
    for time in range(0, int(shown / unit) + 1, step):
        label = str(time)
        if round(time * unit) + len(label) <= shown:
            marks = marks.ljust(round(time * unit)) + label
    return Text(marks, style="dim")


def _row(slots: list[TimelineSlot], first: int, shown: int, unit: float) -> Text:
    row = Text()
    for slot in slots:
        start, stop = (min(round(time * unit), shown) for time in (slot.start, slot.stop))
        if start == stop:
            break
        later = slot.action.stage != first
        kind = slot.action.kind.lower() if later else slot.action.kind
        label = f"{kind}{slot.action.microbatch}"
        width = stop - start
        if len(label) > width:  # a truncated number would be a different number
            label = ""
        # Separate neighbors with a blank column if the label leaves one.
        gap = 1 if width > len(label) else 0
        row.append(" " * (start - len(row)))
        row.append(label.ljust(width - gap, "-"), ACTION_STYLES[slot.action.kind][later])
        row.append(" " * gap)
    row.rstrip()
    return row


def _legend(timeline: Timeline) -> list[Text]:
    kinds = {slot.action.kind for slot in timeline.slots}
    lines = [Text()]
    for kind, meaning in MEANINGS.items():
        if kind in kinds:
            lines[0].append(f" {kind} ", ACTION_STYLES[kind][0])
            lines[0].append(f" {meaning}  ")
    lines[0].rstrip()
    if timeline.schedule.stages_per_rank > 1:
        lines.append(Text("small letters are a rank's later stages", style="dim"))
    return lines
