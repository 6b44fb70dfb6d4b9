"""Draws an estimate with matplotlib, as a stacked bar for each pipeline stage.

The caller saves the figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonlaunch.planning.records import Forecast
from axonlaunch.planning.reports.memory_table import CATEGORY_COLORS, stage_name
from axonlaunch.system.text.formatting import MIB, figures, size, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_memory(forecast: Forecast) -> Figure:
    """Draw the peak memory of each stage, and the memory of a device as a line."""
    # pyplot would choose a backend for the process, so the figure is created without it.
    from matplotlib.figure import Figure

    estimate = forecast.estimate
    unit = unit_of(max(estimate.peak_bytes, forecast.memory_bytes or 0))
    rows = range(len(estimate.ranks))
    figure = Figure(figsize=(9.0, 1.9 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    offsets = [0.0] * len(rows)
    for category, color in CATEGORY_COLORS.items():
        widths = [rank.breakdown[category] / unit for rank in estimate.ranks]
        axes.barh(rows, widths, left=offsets, height=0.8, color=color, label=category)
        offsets = [start + width for start, width in zip(offsets, widths, strict=True)]
    for row, rank in enumerate(estimate.ranks):
        label = f" {figures(rank.peak_bytes / unit)}"
        axes.text(
            *(rank.peak_bytes / unit, row, label),
            va="center_baseline",
            fontsize=9,
            zorder=3,  # in front of the device line
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    widest = estimate.peak_bytes / unit
    if forecast.memory_bytes is not None:
        memory = forecast.memory_bytes / unit
        axes.axvline(memory, color="#a80000", linewidth=1.5, label=f"{size(forecast.memory_bytes)}")
        widest = max(widest, memory)
    axes.set_xlim(0, widest * 1.08)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(rows, [stage_name(rank, estimate) for rank in estimate.ranks])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(
        "MiB of live tensors per rank" if unit == MIB else "GiB of live tensors per rank"
    )
    axes.set_title(f"{forecast.layout}: {estimate.world_size} ranks", loc="left", fontsize=11)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure
