"""Fewer points of a curve that look the same: no peak and no dip is lost.

Source: Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", 2014.
"""

from __future__ import annotations

from collections.abc import Sequence


def indices_to_keep(x: Sequence[float], y: Sequence[float | None], *, buckets: int) -> list[int]:
    """Return the indices of the points to keep, in order: at most four of each bucket.

    The range of x is divided into buckets of equal width; of each its first and last point are
    kept, its lowest and its highest. A point without a value is kept only where it is one of the
    first two: a gap in the curve stays where it begins.

        x = 0 1 2 3 4 5, y = 5 9 4 6 7 1, two buckets -> 0 1 2 | 3 4 5: all are kept
        x = 0 .. 9, y = 0 0 8 0 0 0 -3 0 0 0, one bucket -> 0, 2 (highest), 6 (lowest), 9

    Args:
        x: Ascending.
        y: As many values; None where there is none.
        buckets: 1 or more.
    """
    if len(x) <= 4 * buckets:
        return list(range(len(x)))
    width = (x[-1] - x[0]) / buckets or 1.0
    chosen: set[int] = set()
    begin = 0
    for bucket in range(buckets):
        end = begin
        until = x[0] + width * (bucket + 1)
        while end < len(x) and (x[end] < until or bucket == buckets - 1):
            end += 1
        if end > begin:
            chosen |= {begin, end - 1}
            values = [
                (value, index) for index in range(begin, end) if (value := y[index]) is not None
            ]
            if values:
                chosen |= {min(values)[1], max(values)[1]}
        begin = end
    return sorted(chosen)
