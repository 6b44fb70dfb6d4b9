"""Draws the runs of a random search from an override's values, ranges and intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

_DIGITS = 4
"""Significant digits of a number that is drawn from an interval."""


def random_runs(parsed: Sequence[Any], count: int) -> list[list[str]]:
    """Return the overrides of each run; the same arguments always give the same runs.

    Args:
        parsed: Overrides as Hydra parses them. ``a=1,2,3`` and ``a=range(1,9)`` draw one of their
            values, ``a=interval(1,2)`` a number between the ends, ``a=int(interval(1,9))`` a whole
            number, ``a=tag(log,interval(1e-4,1e-2))`` one whose logarithm is uniform.
        count: Number of runs.
    """
    generator = random.Random(0)
    return [[_draw(override, generator) for override in parsed] for _ in range(count)]


def _draw(override: Any, generator: random.Random) -> str:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return f"{key}={override.get_value_element_as_str()}"
    if not override.is_interval_sweep():
        return f"{key}={generator.choice([*override.sweep_string_iterator()])}"
    interval = override.value()
    start, end = interval.start, interval.end
    is_whole = isinstance(start, int) and isinstance(end, int)
    if "log" in interval.tags:
        value = math.exp(generator.uniform(math.log(start), math.log(end)))
        return f"{key}={round(value) if is_whole else f'{value:.{_DIGITS}g}'}"
    if is_whole:
        return f"{key}={generator.randint(start, end)}"
    return f"{key}={generator.uniform(start, end):.{_DIGITS}g}"


def interval_problems(parsed: Sequence[Any]) -> list[str]:
    """Return why intervals can't be drawn from: an end below the start, a logarithm of 0."""
    problems = []
    for override in parsed:
        if not override.is_interval_sweep():
            continue
        start, end = override.value().start, override.value().end
        if not start < end:
            problems.append(f"{override.input_line}: the first number must be below the second")
        elif "log" in override.value().tags and start <= 0:
            problems.append(f"{override.input_line}: a logarithm needs numbers above 0")
    return problems
