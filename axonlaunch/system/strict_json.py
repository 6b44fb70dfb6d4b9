"""JSON as other programs read it: Python writes ``NaN`` and ``Infinity``, which most refuse."""

from __future__ import annotations

import math
from typing import Any


def finite(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with null for numbers that are infinite or not a number."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in content.items()
    }
