"""Draws a pipeline's timeline as a matplotlib figure. The caller saves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axonlaunch.engines.pipeline.schedule import ActionKind
from axonlaunch.engines.pipeline.timeline import Timeline, TimelineSlot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors by Okabe and Ito, distinguishable with all common forms of color vision. For each kind: a
# light one with dark numbers for a rank's first stage, a dark one with white numbers for later
# stages.
ACTION_COLORS: dict[ActionKind, tuple[str, str]] = {
    "F": ("#8fcdf0", "#0072b2"),
    "B": ("#f7b955", "#a84b00"),
    "I": ("#f0e442", "#8a7d00"),
    "W": ("#7fdcc0", "#006b50"),
}
IDLE = "#ececec"
LABELS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}
MAX_PLOT_INCHES = 40.0  # inches; if numbers would become too small, they are omitted
SMALLEST = 4.0  # points


def draw_timeline(timeline: Timeline) -> Figure:
    """Draw a timeline: a row per rank, time to the right, micro-batch numbers on the actions."""
    # A Figure created directly uses Agg or SVG as savefig requires. pyplot would keep it in a
    # global list and select a backend for the whole process.
    from matplotlib.figure import Figure

    schedule = timeline.schedule
    shortest = min(slot.stop - slot.start for slot in timeline.slots)
    width = min(max(7.0, 1.3 + 0.22 * timeline.span / shortest), MAX_PLOT_INCHES)
    figure = Figure(figsize=(width, 1.75 + 0.42 * schedule.degree), layout="constrained")
    axes = figure.add_subplot()
    points = 72 * (width - 1.3) * shortest / timeline.span  # width of the shortest action
    digits = len(str(schedule.microbatches - 1))
    size = min(9.0, points / (0.62 * digits + 0.3))
    axes.barh(range(schedule.degree), timeline.span, height=0.86, color=IDLE)
    for slot in timeline.slots:
        first = schedule.stages_of(slot.rank)[0]
        _bar(axes, slot, later=slot.action.stage != first, size=size)
    axes.set_xlim(0, timeline.span)
    axes.set_ylim(schedule.degree - 0.5, -0.5)
    axes.set_yticks(range(schedule.degree), [f"rank {rank}" for rank in range(schedule.degree)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"time; a micro-batch's forward on one rank takes {timeline.rank_forward:g}")
    stages = f" of {schedule.stages_per_rank} stages" if schedule.stages_per_rank > 1 else ""
    axes.set_title(
        f"{schedule.name}: {schedule.degree} ranks{stages}, {schedule.microbatches} micro-batches, "
        f"bubble {timeline.bubble_fraction:.1%}",
        loc="left",
        fontsize=11,
    )
    _add_legend(figure, timeline)
    return figure


def _bar(axes: Axes, slot: TimelineSlot, *, later: bool, size: float) -> None:
    axes.barh(
        slot.rank,
        slot.stop - slot.start,
        left=slot.start,
        height=0.86,
        color=ACTION_COLORS[slot.action.kind][later],
        edgecolor="white",
        linewidth=0.8,
    )
    if size >= SMALLEST:
        axes.text(
            (slot.start + slot.stop) / 2,
            slot.rank,
            str(slot.action.microbatch),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color="white" if later else "black",
        )


def _add_legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    kinds = {slot.action.kind for slot in timeline.slots}
    shades = 2 if timeline.schedule.stages_per_rank > 1 else 1
    entries: dict[str, Any] = {
        label: tuple(Patch(color=color) for color in ACTION_COLORS[kind][:shades])
        for kind, label in LABELS.items()
        if kind in kinds
    }
    entries["waits"] = (Patch(color=IDLE),)
    if shades > 1:
        entries["dark: a rank's later stages"] = (Patch(alpha=0.0),)
    figure.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower left",
        ncols=len(entries) if figure.get_figwidth() > 9.5 else 3,
        frameon=False,
        fontsize=9,
    )
