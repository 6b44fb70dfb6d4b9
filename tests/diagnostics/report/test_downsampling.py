"""A curve of fewer points keeps its ends, its peaks and its dips."""

from __future__ import annotations

from hypothesis import given, strategies as st

from axonlaunch.diagnostics.report.downsampling import indices_to_keep

values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(values, st.integers(1, 20))
def test_the_highest_and_the_lowest_value_and_both_ends_are_kept(
    y: list[float | None], buckets: int
) -> None:
    indices = indices_to_keep(range(len(y)), y, buckets=buckets)
    numbers = [value for value in y if value is not None]
    shown = [value for i in indices if (value := y[i]) is not None]
    assert {0, len(y) - 1} <= {*indices}
    assert (max(numbers, default=0), min(numbers, default=0)) == (
        max(shown, default=0),
        min(shown, default=0),
    )


@given(values, st.integers(1, 20))
def test_at_most_four_points_of_a_bucket_are_kept_in_their_order(
    y: list[float | None], buckets: int
) -> None:
    indices = indices_to_keep(range(len(y)), y, buckets=buckets)
    assert len(indices) <= 4 * buckets
    assert indices == sorted(set(indices))


def test_steps_at_uneven_distances_fall_into_buckets_of_equal_width() -> None:
    x = [0, 1, 2, 3, 4, 5, 6, 7, 8, 1000]
    y = [0.0, 1, 9, 2, -3, 2, 1, 2, 1, 5]
    # All except the last are in the first half: its ends, its highest and its lowest.
    assert indices_to_keep(x, y, buckets=2) == [0, 2, 4, 8, 9]
