"""JSON without ``NaN`` and ``Infinity``, which Python writes but most other programs reject."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SUSPECT = re.compile(rb"NaN|Infinity|\d{300}|[eE]\+?\d{3}")
"""Matches every number that a float can't represent, and few others."""


def parse_json(text: bytes) -> Any:
    """Read JSON; numbers that a float can't represent (NaN, Infinity, 1e999, 10**400) become None.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The text is nested too deeply.
    """
    if not _SUSPECT.search(text):  # true for all lines that a run writes
        return json.loads(text)
    return json.loads(
        text,
        parse_constant=lambda name: None,
        parse_float=finite_number,
        parse_int=lambda digits: finite_number(int(digits)),
    )


def finite_number(value: str | float) -> float | None:
    """Return a number, or the number in a text; None if a float can't represent it."""
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    if not math.isfinite(number):
        return None
    return number if isinstance(value, str) else value


def finite(content: Any) -> Any:
    """Return nested dicts and lists with None for infinite and NaN values."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def plain_number(value: Any) -> float | None:
    """Return a finite number of parsed JSON unchanged; None for every other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
