"""A bucket returns its inputs, and refuses inputs that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import axonlaunch as ax
from axonlaunch.comm.averaging import gradient_bucket


def test_tensors_lie_one_after_another_and_come_back_in_their_shapes() -> None:
    bucket = ax.GradientBucket(10)
    first, second = torch.randn(2, 3), torch.randn(4)
    assert bucket.add(first)
    assert bucket.add(second)
    assert bucket.size == 10
    assert torch.equal(bucket.data, torch.cat([first.flatten(), second]))
    assert [torch.equal(a, b) for a, b in zip(bucket.extract(), [first, second], strict=True)]
    assert [part.shape for part in bucket.extract()] == [(2, 3), (4,)]


def test_what_has_no_room_is_left_out_whole() -> None:
    bucket = ax.GradientBucket(5)
    assert bucket.add(torch.ones(3))
    assert not bucket.is_full
    assert not bucket.add(torch.ones(3))
    assert bucket.data.tolist() == [1.0] * 3
    assert bucket.add(torch.zeros(2))
    assert bucket.is_full


def test_it_copies_what_it_takes() -> None:
    gradient = torch.ones(2)
    bucket = ax.GradientBucket(2)
    bucket.add(gradient)
    gradient.zero_()
    assert bucket.data.tolist() == [1.0, 1.0]


def test_a_cleared_bucket_is_empty_and_what_was_extracted_stays() -> None:
    bucket = ax.GradientBucket(2)
    assert bucket.is_empty
    bucket.add(torch.ones(2))
    assert not bucket.is_empty
    [extracted] = bucket.extract()
    bucket.clear()
    assert (bucket.is_empty, bucket.size, bucket.data.tolist()) == (True, 0, [])
    bucket.add(torch.zeros(2, dtype=torch.float64))  # another dtype than before
    assert extracted.tolist() == [1.0, 1.0]


def test_writing_to_its_data_is_seen_in_what_is_extracted() -> None:
    bucket = ax.GradientBucket(4)
    bucket.add(torch.ones(2, 2))
    bucket.data.mul_(3)
    assert bucket.extract()[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_dtypes_are_not_mixed() -> None:
    bucket = ax.GradientBucket(4)
    bucket.add(torch.ones(2))
    with pytest.raises(ValueError, match=r"torch.float64 on cpu can't join .* torch.float32"):
        bucket.add(torch.ones(2, dtype=torch.float64))
    assert bucket.size == 2


def test_a_dtype_of_its_own_is_what_it_keeps() -> None:
    bucket = ax.GradientBucket(2, dtype=torch.bfloat16)
    bucket.add(torch.tensor([1.0, 1 / 3]))
    assert bucket.data.dtype is torch.bfloat16


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=-1: use 0 or more elements"):
        ax.GradientBucket(-1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_ranks_average_it_in_its_dtype(dtype: torch.dtype | None) -> None:
    def run(world: ax.World) -> Tensor:
        bucket = ax.GradientBucket(3, dtype=dtype)
        bucket.add(torch.arange(3.0) * (world.rank + 1))
        bucket.start(world.default_group.torch_group)
        bucket.finish()
        return bucket.data

    for mean in ax.World.mock(3).run(run):
        assert mean.dtype is (dtype or torch.float32)
        torch.testing.assert_close(mean.float(), torch.arange(3.0) * 2, rtol=1e-2, atol=0)


def test_a_sum_in_a_smaller_type_does_not_overflow() -> None:
    def run(world: ax.World) -> list[float]:
        bucket = ax.GradientBucket(1, dtype=torch.float16)
        bucket.add(torch.tensor([60000.0]))
        bucket.start(world.default_group.torch_group)
        bucket.finish()
        return bucket.data.tolist()

    assert ax.World.mock(4).run(run) == [[60000.0]] * 4


def test_many_small_tensors_of_one_rank_reach_the_others_in_few_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_bucket, "BUCKET_BYTES", 2000)
    shapes = [(3,), (2, 2), (), (600,), (5,)]

    def run(world: ax.World) -> tuple[list[Tensor], int]:
        made = [torch.full(shape, float(world.rank + n)) for n, shape in enumerate(shapes)]
        made.append(torch.full((4,), world.rank, dtype=torch.int64))
        group = world.default_group.torch_group
        sent = 0

        def broadcast(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += 1
            return dist.broadcast(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_bucket, "dist", SimpleNamespace(broadcast=broadcast))
            gradient_bucket.broadcast_tensors(made, source=1, group=group)
        return made, sent

    for made, sent in ax.World.mock(2).run(run):
        assert [tensor.unique().tolist() for tensor in made] == [[1 + n] for n in range(5)] + [[1]]
        assert sent == 3  # fp32 up to 2000 bytes, the rest of it, int64
