"""Packs documents, or parts of them, into rows.

A part of n + 1 tokens takes n positions of a row: each token except the last is an input, each
except the first a target. No token is predicted from another document, and every target counts
once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from axonlaunch.data.datasets.shuffle import Indices

_FEW_ROWS = 64
"""Rows that few documents are spread over: two batches of the default size."""


@dataclass(frozen=True)
class RowTable:
    """The documents, or parts of them, in each row.

    Attributes:
        starts: Index of each part's first token among all tokens, [parts].
        places: Positions that each part takes: its number of tokens less one, [parts].
        first: Index of the first part of each row, and the number of parts, [rows + 1].
        length: Positions of a row.
    """

    starts: Indices
    places: Indices
    first: Indices
    length: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def filled(self) -> float:
        """Fraction of the positions of all rows that documents fill."""
        return float(self.places.sum() / max(1, len(self) * self.length))

    def pieces(self, row: int) -> tuple[Indices, Indices]:
        """Return the starts and numbers of positions of a row's parts."""
        part = slice(self.first[row], self.first[row + 1])
        return self.starts[part], self.places[part]


def concat(starts: Indices, places: Indices, *, length: int) -> RowTable:
    """Fill rows with documents one after another, cut at the end of each row.

    Args:
        starts: Index of each document's first token.
        places: Positions that each document takes, its number of tokens less one; at least 1.
        length: Positions of a row.
    """
    ends = np.cumsum(places)
    begins = ends - places
    total = int(ends[-1]) if len(ends) else 0
    # A part is between two neighboring edges, of documents or of rows.
    edges = np.union1d(begins, np.arange(0, total, length))
    document = np.searchsorted(ends, edges, side="right")
    rows = -(-total // length)
    first = np.searchsorted(edges, np.arange(rows + 1) * length)
    sizes = np.diff(edges, append=total)
    edges += (starts - begins)[document]  # in place: a large corpus has millions of them
    return RowTable(edges, sizes, first, length)


def one_each(starts: Indices, places: Indices, *, length: int) -> RowTable:
    """Put each document in a separate row; no document may be longer than a row."""
    return RowTable(starts, places, np.arange(len(starts) + 1), length)


def best_fit(starts: Indices, places: Indices, *, length: int) -> RowTable:
    """Put each document, longest first, into the fullest row that has room for it.

    This is best-fit decreasing; no document may be longer than a row. Rows are listed by their free
    positions. The smallest sufficient number of free positions is found as the lowest set bit of an
    integer, so the time is linear in the number of documents.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling", 2024.
    """
    order = np.argsort(-places, kind="stable")
    row_of = np.empty(len(places), dtype=np.int64)
    rows_with: list[list[int]] = [[] for _ in range(length + 1)]
    has_rows, rows = 0, 0  # bit n of has_rows: whether a row has n free positions
    for document in order.tolist():
        needed = int(places[document])
        enough = has_rows >> needed
        if enough:
            free = needed + (enough & -enough).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                has_rows ^= 1 << free
        else:
            free, row, rows = length, rows, rows + 1
        row_of[document] = row
        left = free - needed
        if left:
            rows_with[left].append(row)
            has_rows |= 1 << left
    return _by_row(starts, places, row_of, length=length)


def best_fit_spread(starts: Indices, places: Indices, *, length: int) -> RowTable:
    """Pack by ``best_fit``, but spread few documents over more rows.

    A handful of rows would be less than a batch. Each document, longest first, goes into the
    emptiest row. If one does not fit, the result is that of ``best_fit``.
    """
    table = best_fit(starts, places, length=length)
    if len(table) >= min(_FEW_ROWS, len(places)):
        return table
    order = np.argsort(-places, kind="stable")
    row_of = np.empty(len(places), dtype=np.int64)
    rows = [(0, row) for row in range(min(_FEW_ROWS, len(places)))]
    for document in order.tolist():
        taken, row = rows[0]
        if taken + int(places[document]) > length:
            return table
        heapq.heapreplace(rows, (taken + int(places[document]), row))
        row_of[document] = row
    return _by_row(starts, places, row_of, length=length)


def _by_row(starts: Indices, places: Indices, row_of: Indices, *, length: int) -> RowTable:
    by_row = np.argsort(row_of, kind="stable")
    first = np.searchsorted(row_of[by_row], np.arange(row_of.max(initial=-1) + 2))
    return RowTable(starts[by_row], places[by_row], first, length)


PACKERS = {"auto": best_fit_spread, "concat": concat, "best_fit": best_fit, "none": one_each}
