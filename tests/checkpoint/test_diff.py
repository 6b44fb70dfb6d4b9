"""Comparing two checkpoints finds each tensor whose bits differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from axonlaunch.checkpoint import Checkpoint, Retention, list_checkpoints
from axonlaunch.checkpoint.loading.diff import TensorDifference, compare_checkpoints
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World


def saved(folder: Path, tensor: Tensor) -> Checkpoint:
    def on_rank(world: World) -> None:
        saver = Saver(folder, world=world, retention=Retention(newest=1))
        saver.save({"model": {"w": tensor}}, step=1, samples=1)
        saver.close()

    World.mock(1).run(on_rank)
    [checkpoint] = list_checkpoints(folder)
    return checkpoint


def compare(folder: Path, first: Tensor, second: Tensor) -> list[TensorDifference]:
    return compare_checkpoints(saved(folder / "a", first), saved(folder / "b", second))


@pytest.mark.parametrize(
    "values",
    [torch.tensor([1.0, math.nan, math.inf]), torch.ones(()).bfloat16(), torch.zeros(0, 3)],
)
def test_copies_are_equal_whatever_their_numbers(tmp_path: Path, values: Tensor) -> None:
    assert compare(tmp_path, values, values.clone()) == []


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (torch.tensor([1.0, math.nan, 0.0]), "differs in NaN or infinite elements"),
        (torch.tensor([1.0, 2.0, math.inf]), "differs in NaN or infinite elements"),
        (torch.tensor([1.0, 2.0, 0.0]).bfloat16(), "equal numbers in float32 and bfloat16"),
        (torch.tensor([1.0, 2.0, -0.0]), "differs only in signs of zeros or bits of NaN"),
    ],
    ids=["nan", "infinity", "dtype", "sign of zero"],
)
def test_a_difference_that_is_no_number_has_a_reason(
    tmp_path: Path, second: Tensor, reason: str
) -> None:
    first = torch.tensor([1.0, 2.0, 0.0])
    for number, pair in enumerate([(first, second), (second, first)]):
        [found] = compare(tmp_path / str(number), *pair)
        assert (found.name, found.largest, found.relative) == ("model.w", None, None)
        assert set(found.reason.split()) == set(reason.split())


def test_elements_that_are_nan_in_both_do_not_hide_a_number(tmp_path: Path) -> None:
    first, second = torch.tensor([math.nan, 3.0, 4.0]), torch.tensor([math.nan, 3.0, 6.0])
    assert compare(tmp_path, first, second) == [TensorDifference("model.w", 2.0, None)]


@pytest.mark.parametrize(
    ("first", "second", "largest"),
    [
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1.0),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2.0**64),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 5j]), 3.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
    ],
    ids=["large integers", "smallest and largest integer", "complex", "bool"],
)
def test_numbers_of_other_types_differ_by_a_number(
    tmp_path: Path, first: Tensor, second: Tensor, largest: float
) -> None:
    [found] = compare(tmp_path, first, second)
    assert (found.largest, found.reason) == (largest, "")


def test_relative_difference_is_a_ratio_of_norms(tmp_path: Path) -> None:
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 6.0])
    assert compare(tmp_path / "1", first, second) == [TensorDifference("model.w", 2.0, 0.4)]
    [from_zero] = compare(tmp_path / "2", torch.zeros(2), second)
    assert (from_zero.largest, from_zero.relative) == (6.0, None)
