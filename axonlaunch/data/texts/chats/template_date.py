"""Writes a given day into chat templates that would write today's, such as that of Llama 3.2.

The tokens of a run would otherwise change from day to day.
"""

from __future__ import annotations

import functools
import re
from datetime import date, datetime, time

_FUNCTION = "strftime_now"
"""Function of transformers that formats the present time."""
_CALL = re.compile(rf"""{_FUNCTION}\s*\(\s*(["'])((?:(?!\1|\\|\n).)*)\1\s*\)""")
_ANY_CALL = re.compile(rf"{_FUNCTION}\s*\(")


def writes_date(template: str) -> bool:
    """Return whether a template writes the present date or time."""
    return bool(_ANY_CALL.search(template))


@functools.lru_cache(maxsize=8)
def with_date(template: str, day: str) -> str:
    """Return a template that writes a day, at midnight, instead of the present time.

    Args:
        template: Template in Jinja.
        day: The day, in ISO format.

    Raises:
        ValueError: The template computes the format of the time.
    """
    midnight = datetime.combine(date.fromisoformat(day), time())

    def write_day(call: re.Match[str]) -> str:
        return f"({call[1]}{midnight.strftime(call[2])}{call[1]})"

    changed = _CALL.sub(write_day, template)
    if writes_date(changed):
        raise ValueError(
            f"the chat template computes the format of the time that it writes ({_FUNCTION}), so "
            "the tokens of a row would change from day to day; write the format as a text"
        )
    return changed
