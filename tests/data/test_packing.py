"""Assignment of documents to rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from axonlaunch.data.datasets.packing import PACKERS, RowTable, best_fit, concat

LENGTH = 16
LENGTHS = st.lists(st.integers(1, LENGTH), max_size=60)


def packed(how: str, places: list[int]) -> tuple[RowTable, np.ndarray]:
    sizes = np.array(places, dtype=np.int64)
    starts = np.cumsum(sizes + 1) - sizes - 1
    return PACKERS[how](starts, sizes, length=LENGTH), starts


def predictions(table: RowTable) -> list[int]:
    """Return the positions of tokens that a row predicts from."""
    positions = []
    for row in range(len(table)):
        for start, places in zip(*table.pieces(row), strict=True):
            positions += range(start, start + places)
    return positions


@pytest.mark.parametrize("how", PACKERS)
@given(places=LENGTHS)
def test_each_token_but_a_documents_last_is_predicted_from_once(
    how: str, places: list[int]
) -> None:
    table, starts = packed(how, places)
    expected = [start + i for start, n in zip(starts, places, strict=True) for i in range(n)]
    assert sorted(predictions(table)) == expected
    assert all(table.pieces(row)[1].sum() <= LENGTH for row in range(len(table)))


@given(places=LENGTHS)
def test_concat_leaves_room_only_in_the_last_row(places: list[int]) -> None:
    table, _ = packed("concat", places)
    assert [table.pieces(row)[1].sum() for row in range(len(table) - 1)] == [LENGTH] * (
        len(table) - 1
    )


@given(places=LENGTHS)
def test_best_fit_cuts_no_document(places: list[int]) -> None:
    table, _ = packed("best_fit", places)
    assert sorted(table.places) == sorted(places)


def test_best_fit_puts_a_document_into_the_fullest_row_that_has_room() -> None:
    table, starts = packed("best_fit", [4, 13, 9, 3, 3])
    # 13 and 9 begin rows, 4 only fits the second, then one 3 fills each row.
    rows = [sorted(table.pieces(row)[1].tolist()) for row in range(len(table))]
    assert rows == [[3, 13], [3, 4, 9]]
    assert starts.tolist() == [0, 5, 19, 29, 33]


def test_a_document_longer_than_a_row_is_cut_where_rows_end() -> None:
    table = concat(np.array([0, 100]), np.array([5, 40]), length=LENGTH)
    assert [table.pieces(row)[0].tolist() for row in range(3)] == [[0, 100], [111], [127]]
    assert [table.pieces(row)[1].tolist() for row in range(3)] == [[5, 11], [16], [13]]


def test_many_documents_are_packed_in_a_time_that_grows_with_their_number() -> None:
    rng = np.random.default_rng(0)
    places = np.minimum(rng.geometric(1 / 300, size=20_000), 2048)
    table = best_fit(np.cumsum(places + 1), places, length=2048)
    assert table.filled > 0.99


@pytest.mark.parametrize(
    ("places", "rows"),
    [
        ([5] * 50, 50),  # one row for each
        ([5] * 80, 64),  # best_fit fills 27, which are spread over 64
        ([5] * 300, 100),  # as best_fit fills them
        ([12] * 28 + [5] * 57 + [4] * 84, 61),  # as best_fit: the last ones fit into none of 64
    ],
)
def test_a_few_documents_are_spread_over_rows_that_are_more_than_a_batch(
    places: list[int], rows: int
) -> None:
    table, _ = packed("auto", places)
    assert len(table) == rows
    assert sorted(table.places) == sorted(places)
    fullest = [int(table.pieces(row)[1].sum()) for row in range(rows)]
    assert 0 < min(fullest) <= max(fullest) <= LENGTH
