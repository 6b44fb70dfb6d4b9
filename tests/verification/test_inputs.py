"""What both sides of a comparison are fed."""

from __future__ import annotations

from axonlaunch.data.samples import Samples
from axonlaunch.verification.inputs import uneven


def counted(samples: Samples, *, size: int) -> list[list[int]]:
    return [part.whole if part.is_counted else [] for part in samples.micro_batches(size)]


def test_of_samples_of_any_structure_the_same_ones_count_however_they_are_divided() -> None:
    whole = Samples(range(24), collate=list)
    for step in range(3):
        expected = counted(uneven(whole, first_row=0, step=step), size=24)[0]
        halves = [
            uneven(whole.rows(first, first + 12).ready(4), first_row=first, step=step)
            for first in (0, 12)
        ]
        counted_parts = [part for half in halves for part in counted(half, size=4)]
        assert [item for part in counted_parts for item in part] == expected
        assert len({len(part) for part in counted_parts}) > 1, "as many counted in each"
        assert 12 < len(expected) < 24


def test_samples_that_were_not_counted_stay_so() -> None:
    left = Samples(range(24), collate=list).uncounted(2)
    assert counted(uneven(left, first_row=0, step=0), size=12) == [[0, 1], []]
