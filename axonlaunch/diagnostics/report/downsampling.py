"""Reduces the points of a curve without losing peaks or dips.

Source: Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", 2014.
"""

from __future__ import annotations

from collections.abc import Sequence


def indices_to_keep(x: Sequence[float], y: Sequence[float | None], *, buckets: int) -> list[int]:
    """Return the indices of the points to keep, in order: at most four per bucket.

    The range of x is divided into buckets of equal width. The first, last, lowest and highest point
    of each bucket are kept. A point without a value is kept only if it is first or last in its
    bucket.

        x = 0 1 2 3 4 5, y = 5 9 4 6 7 1, two buckets -> 0 1 2 | 3 4 5, all points
        x = 0 .. 9, y = 0 0 8 0 0 0 -3 0 0 0, one bucket -> 0, 2 (highest), 6 (lowest), 9

    Args:
        x: Ascending values.
        y: One value for each x; None marks a gap.
        buckets: Number of buckets, 1 or more.
    """
    if len(x) <= 4 * buckets:
        return list(range(len(x)))
    width = (x[-1] - x[0]) / buckets or 1.0
    kept: set[int] = set()
    begin = 0
    for bucket in range(buckets):
        end = begin
        until = x[0] + width * (bucket + 1)
        while end < len(x) and (x[end] < until or bucket == buckets - 1):
            end += 1
        if end > begin:
            kept |= {begin, end - 1}
            values = [
                (value, index) for index in range(begin, end) if (value := y[index]) is not None
            ]
            if values:
                kept |= {min(values)[1], max(values)[1]}
        begin = end
    return sorted(kept)
