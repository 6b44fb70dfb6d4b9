"""JSON as other programs read it: Python writes ``NaN`` and ``Infinity``, which most refuse."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SUSPECT = re.compile(rb"NaN|Infinity|\d{300}|[eE]\+?\d{3}")
"""Matches text of every number that no float holds, and of few others."""


def read_json(text: bytes) -> Any:
    """Read JSON; numbers that no float holds (NaN, Infinity, 1e999, 10**400) become None.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deep.
    """
    if not _SUSPECT.search(text):  # such as all lines that a run writes
        return json.loads(text)
    return json.loads(
        text,
        parse_constant=lambda name: None,
        parse_float=finite_number,
        parse_int=lambda digits: finite_number(int(digits)),
    )


def finite_number(value: str | float) -> float | None:
    """Return a number, or the number in a text; None if no float holds it."""
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    if not math.isfinite(number):
        return None
    return number if isinstance(value, str) else value


def finite(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with null for numbers that are infinite or not a number."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in content.items()
    }
