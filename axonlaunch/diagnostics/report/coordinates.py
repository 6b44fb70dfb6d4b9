"""Places runs on parallel axes: one for each setting in which they differ, and one for the metric.

Source: Inselberg, "The plane with parallel coordinates", 1985.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from axonlaunch.diagnostics.report.comparison import brief, changed_settings, ranking
from axonlaunch.diagnostics.report.record.run_record import RunRecord
from axonlaunch.system.storage.strict_json import plain_number

_MOST_AXES = 12
_MOST_TICKS = 6
_LOGARITHMIC = 20.0
"""Smallest quotient of the highest and lowest positive value of a logarithmic axis."""


@dataclass(frozen=True)
class ParallelAxis:
    """A vertical axis.

    Attributes:
        name: Setting or metric.
        ticks: Position from 0 (bottom) to 1 and text of each label.
        positions: Position of each run; None if it has no value.
        texts: Value of each run as text.
    """

    name: str
    ticks: list[tuple[float, str]]
    positions: list[float | None]
    texts: list[str]


def coordinates_of(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the axes of two or more runs; None if no setting differs.

    Returns:
        ``{"axes": [...], "left_out": number of settings without an axis, "quality": [...]}`` with
        axes as the fields of ``ParallelAxis``. The quality of a run is 1 for the best value of the
        metric, 0 for the worst, and None without a value.
    """
    settings = changed_settings(runs)
    if not settings:
        return None
    axes = [
        _axis(
            key,
            [run.config.get(key) for run in runs],
            [brief(run.config.get(key), text) for run, text in zip(runs, texts, strict=True)],
        )
        for key, texts in settings[:_MOST_AXES]
    ]
    ranked = ranking(runs)
    shown = ["" if value is None else f"{value:.4g}" for value in ranked.values]
    metric = _numeric(ranked.name, ranked.values, shown)
    shares = [
        None if at is None else at if ranked.is_highest else 1 - at for at in metric.positions
    ]
    return {
        "axes": [asdict(axis) for axis in [*axes, metric]],
        "left_out": len(settings) - len(axes),
        "quality": shares,
    }


def _axis(name: str, values: Sequence[Any], texts: list[str]) -> ParallelAxis:
    numbers = [plain_number(value) for value in values]
    if all(number is not None for number in numbers):
        return _numeric(name, numbers, texts)
    categories = list(dict.fromkeys(texts))
    at = {text: _share(n, len(categories) - 1) for n, text in enumerate(reversed(categories))}
    return ParallelAxis(
        name, [(at[text], text) for text in categories], [at[t] for t in texts], texts
    )


def _numeric(name: str, values: Sequence[float | None], texts: list[str]) -> ParallelAxis:
    """Return an axis of numbers: logarithmic if they are positive and of different magnitudes."""
    numbers = [value for value in values if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    is_logarithmic = low > 0 and high / low >= _LOGARITHMIC
    scale = math.log if is_logarithmic else float
    half_low = scale(low) / 2  # halves, because the difference of huge numbers is infinite

    def height_of(value: float) -> float:
        return round(_share(scale(value) / 2 - half_low, scale(high) / 2 - half_low), 4)

    marked = {value: text for value, text in zip(values, texts, strict=True) if value is not None}
    if len(marked) > _MOST_TICKS:
        between = [scale(low) * (1 - n / 4) + scale(high) * n / 4 for n in range(5)]
        if is_logarithmic:
            between = [math.exp(each) for each in between]
        marked = {value: f"{value:.3g}" for value in between}
    return ParallelAxis(
        name,
        [(height_of(value), text) for value, text in marked.items()],
        [None if value is None else height_of(value) for value in values],
        texts,
    )


def _share(part: float, total: float) -> float:
    return part / total if total else 0.5
