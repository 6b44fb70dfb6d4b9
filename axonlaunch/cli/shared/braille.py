"""Draws a curve as a line of braille characters, each of which has two columns of four dots.

Source: The Unicode Standard, block "Braille Patterns", for the bits of the dots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

_EMPTY = 0x2800
_BITS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Bits of a character's dots, by column from the left and by row from below."""


def braille_line(
    x: Sequence[float], y: Sequence[float | None], *, width: int, height: int
) -> tuple[list[str], float, float]:
    """Return a chart in which a line joins the points of a curve: rows from above, lowest, highest.

    Each column of dots shows the mean of its points. The lowest mean is at the bottom and the
    highest at the top; a constant is in the middle.

    Args:
        x: Ascending positions, one or more.
        y: One value for each x; None leaves a gap.
        width: Characters in a row.
        height: Number of rows.
    """
    parts = list(_means(x, y, 2 * width))
    values = [value for part in parts for _, value in part]
    low, high = min(values, default=0.0), max(values, default=0.0)
    top = 4 * height - 1
    cells = [[_EMPTY] * width for _ in range(height)]

    def level(value: float) -> float:
        return (value - low) / (high - low) * top if high > low else top / 2

    def draw(column: int, start: float, stop: float) -> None:
        for row in range(round(min(start, stop)), round(max(start, stop)) + 1):
            cells[row // 4][column // 2] |= _BITS[column % 2][row % 4]

    for part in parts:
        column, value = part[0]
        draw(column, level(value), level(value))
        for (column, start), (until, stop) in pairwise(part):
            step = (level(stop) - level(start)) / (until - column)
            for number in range(until - column):
                at = level(start) + number * step
                draw(column + number + 1, at, at + step)
    return ["".join(map(chr, row)) for row in reversed(cells)], low, high


def _means(
    x: Sequence[float], y: Sequence[float | None], columns: int
) -> Iterator[list[tuple[int, float]]]:
    """Yield the parts of a curve without gaps: columns that have points, with their means."""
    width = (x[-1] - x[0]) / columns or 1.0
    part: list[tuple[int, float]] = []
    sums: list[float] = []
    for position, value in zip(x, y, strict=True):
        if value is None:
            if part:
                yield part
            part, sums = [], []
            continue
        column = min(columns - 1, int((position - x[0]) / width))
        if part and part[-1][0] == column:
            sums.append(value)
            part[-1] = (column, sum(each / len(sums) for each in sums))
        else:
            sums = [value]
            part.append((column, value))
    if part:
        yield part
