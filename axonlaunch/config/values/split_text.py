"""Parses the splits of a data set, written as for ``datasets``: ``train[:20%]+test[-100:]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = re.compile(
    r"\s*(?P<name>\w+(?:\.\w+)*)"
    r"(?:\[(?P<start>-?\d+)?(?P<start_percent>%)?:(?P<stop>-?\d+)?(?P<stop_percent>%)?\])?\s*"
)
_EXAMPLE = "write train, train[:1000], train[10%:20%] or train+test"


@dataclass(frozen=True)
class SplitSlice:
    """A split, or a part of its rows.

    Attributes:
        name: Name of the split.
        start: Index of the first row, or a percentage; negative numbers count from the end; None:
            the first row.
        stop: Index of the row after the last one, or a percentage; None: the end.
        in_percent: Whether the bounds are percentages.
    """

    name: str
    start: int | None = None
    stop: int | None = None
    in_percent: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows of the split."""
        return self.start is None and self.stop is None

    @property
    def needs_count(self) -> bool:
        """Whether its rows depend on the number of rows of the split."""
        return self.in_percent or min(self.start or 0, self.stop or 0) < 0

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Return the index of the first row and of the one after the last.

        Percentages are rounded to the nearest row, as by ``datasets.ReadInstruction``.

        Args:
            num_rows: Number of rows of the split.
        """
        start, stop = (
            None if bound is None else round(bound * num_rows / 100) if self.in_percent else bound
            for bound in (self.start, self.stop)
        )
        first, last = start or 0, num_rows if stop is None else stop
        first = max(num_rows + first, 0) if first < 0 else first
        last = max(num_rows + last, 0) if last < 0 else last
        return min(first, num_rows), min(last, num_rows)


def parse_splits(text: str) -> list[SplitSlice]:
    """Parse ``NAME[START:STOP]``, joined by ``+``; the bounds are rows or percentages.

    Raises:
        ValueError: The text has another form, or a percentage is above 100.
    """
    slices = []
    for part in text.split("+"):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{part.strip() or text!r} is no split; {_EXAMPLE}")
        start, stop = (None if found[key] is None else int(found[key]) for key in ("start", "stop"))
        given = [found[f"{key}_percent"] for key in ("start", "stop") if found[key] is not None]
        in_percent = any(given)
        if in_percent and not all(given):
            raise ValueError(f"{part.strip()} has a percentage and a row; use one of them")
        if in_percent and max(abs(start or 0), abs(stop or 0)) > 100:
            raise ValueError(f"{part.strip()} has more than 100%; {_EXAMPLE}")
        slices.append(SplitSlice(found["name"], start, stop, in_percent))
    return slices
