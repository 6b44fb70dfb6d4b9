"""A bucket of rows has the layout of shards, and sums without overflow.

The checks of every backend test that each rank gets the mean of its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axonlaunch.comm import World
from axonlaunch.comm.averaging.row_bucket import RowBucket, rows_of

SHAPES = [torch.Size(shape) for shape in ((5, 2), (3,), (), (1, 4), (8, 3), (0, 2))]


def test_row_bucket_padding_is_minimal() -> None:
    def run(world: World) -> int:
        return RowBucket(SHAPES, group=world.default_group).capacity

    # 2 of 5 rows each, 1 of 3, the scalar, 1 of 1, 3 of 8 rows each.
    assert World.mock(3).run(run) == [3 * (2 * 2 + 1 + 1 + 4 + 3 * 3)] * 3


def test_row_bucket_sum_in_smaller_dtype_does_not_overflow() -> None:
    """Half of fp16's largest number from each of four ranks."""

    def run(world: World) -> Tensor:
        bucket = RowBucket([torch.Size((4,))], group=world.default_group, dtype=torch.float16)
        bucket.start([torch.full((4,), 30_000.0)])
        return bucket.finish()[0]

    for rows in World.mock(4).run(run):
        assert rows.dtype == torch.float16
        assert rows.tolist() == [30_000.0]


def test_row_bucket_divides_rows_like_torch() -> None:
    for count in range(9):
        for ranks in range(1, 5):
            full = torch.arange(count)
            chunks = [chunk.tolist() for chunk in full.chunk(ranks)] if count else []
            chunks += [[]] * (ranks - len(chunks))
            assert chunks == [
                full[rows_of(count, rank=rank, ranks=ranks)].tolist() for rank in range(ranks)
            ]
