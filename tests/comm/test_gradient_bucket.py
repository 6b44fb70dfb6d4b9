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


def test_bucket_packs_and_returns_tensors() -> None:
    bucket = ax.GradientBucket(10)
    first, second = torch.randn(2, 3), torch.randn(4)
    assert bucket.add(first)
    assert bucket.add(second)
    assert bucket.size == 10
    assert torch.equal(bucket.data, torch.cat([first.flatten(), second]))
    assert [torch.equal(a, b) for a, b in zip(bucket.extract(), [first, second], strict=True)]
    assert [part.shape for part in bucket.extract()] == [(2, 3), (4,)]


def test_tensor_that_does_not_fit_bucket_is_left_out() -> None:
    bucket = ax.GradientBucket(5)
    assert bucket.add(torch.ones(3))
    assert not bucket.is_full
    assert not bucket.add(torch.ones(3))
    assert bucket.data.tolist() == [1.0] * 3
    assert bucket.add(torch.zeros(2))
    assert bucket.is_full


def test_bucket_copies_tensors() -> None:
    gradient = torch.ones(2)
    bucket = ax.GradientBucket(2)
    bucket.add(gradient)
    gradient.zero_()
    assert bucket.data.tolist() == [1.0, 1.0]


def test_cleared_bucket_keeps_extracted_tensors() -> None:
    bucket = ax.GradientBucket(2)
    assert bucket.is_empty
    bucket.add(torch.ones(2))
    assert not bucket.is_empty
    [extracted] = bucket.extract()
    bucket.clear()
    assert (bucket.is_empty, bucket.size, bucket.data.tolist()) == (True, 0, [])
    bucket.add(torch.zeros(2, dtype=torch.float64))  # another dtype than before
    assert extracted.tolist() == [1.0, 1.0]


def test_bucket_extracts_current_data() -> None:
    bucket = ax.GradientBucket(4)
    bucket.add(torch.ones(2, 2))
    bucket.data.mul_(3)
    assert bucket.extract()[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_bucket_does_not_mix_dtypes() -> None:
    bucket = ax.GradientBucket(4)
    bucket.add(torch.ones(2))
    with pytest.raises(ValueError, match=r"torch.float64 on cpu can't join .* torch.float32"):
        bucket.add(torch.ones(2, dtype=torch.float64))
    assert bucket.size == 2


def test_bucket_keeps_explicit_dtype() -> None:
    bucket = ax.GradientBucket(2, dtype=torch.bfloat16)
    bucket.add(torch.tensor([1.0, 1 / 3]))
    assert bucket.data.dtype is torch.bfloat16


def test_negative_bucket_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=-1: use 0 or more elements"):
        ax.GradientBucket(-1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_bucket_is_averaged_in_its_dtype(dtype: torch.dtype | None) -> None:
    def run(world: ax.World) -> Tensor:
        bucket = ax.GradientBucket(3, dtype=dtype)
        bucket.add(torch.arange(3.0) * (world.rank + 1))
        bucket.start(world.default_group.torch_group)
        bucket.finish()
        return bucket.data

    for mean in ax.World.mock(3).run(run):
        assert mean.dtype is (dtype or torch.float32)
        torch.testing.assert_close(mean.float(), torch.arange(3.0) * 2, rtol=1e-2, atol=0)


def test_bucket_sum_in_smaller_dtype_does_not_overflow() -> None:
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
        tensors = [torch.full(shape, float(world.rank + n)) for n, shape in enumerate(shapes)]
        tensors.append(torch.full((4,), world.rank, dtype=torch.int64))
        group = world.default_group.torch_group
        sent = 0

        def broadcast(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += 1
            return dist.broadcast(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_bucket, "dist", SimpleNamespace(broadcast=broadcast))
            gradient_bucket.broadcast_tensors(tensors, source=1, group=group)
        return tensors, sent

    for tensors, sent in ax.World.mock(2).run(run):
        assert [tensor.unique().tolist() for tensor in tensors] == [[1 + n] for n in range(5)] + [
            [1]
        ]
        assert sent == 3  # fp32 up to 2000 bytes, the rest of it, int64
