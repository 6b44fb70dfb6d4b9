"""Inputs of both sides of a comparison."""

from __future__ import annotations

import torch
from torch import nn

from axonlaunch.config.options.data import IGNORE_INDEX
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.data.datasets.samples import Samples
from axonlaunch.verification.references.comparison_inputs import make_uneven, overflow
from axonlaunch.verification.references.comparison_plan import ComparisonPlan


def counted(samples: Samples, *, size: int) -> list[list[int]]:
    return [part.full if part.is_counted else [] for part in samples.micro_batches(size)]


def test_of_samples_of_any_structure_the_same_ones_count_however_they_are_divided() -> None:
    full = Samples(range(24), collate=list)
    for step in range(3):
        expected = counted(make_uneven(full, step=step), size=24)[0]
        halves = [
            make_uneven(full.rows(12 * shard, 12 * shard + 12).ready(4), step=step, shard=shard)
            for shard in (0, 1)
        ]
        counted_parts = [part for half in halves for part in counted(half, size=4)]
        assert [item for part in counted_parts for item in part] == expected
        assert len({len(part) for part in counted_parts}) > 1, "as many counted in each"
        assert 12 < len(expected) < 24


def test_samples_that_were_not_counted_stay_so() -> None:
    left = Samples(range(24), collate=list).uncounted(2, marks_targets=True)
    assert counted(make_uneven(left, step=0), size=12) == [[0, 1], []]


def test_rows_of_one_document_end_with_padding_that_is_no_target() -> None:
    tokens, present = torch.arange(64).reshape(4, 16), torch.ones(4, 16, dtype=torch.bool)
    present[3, 12:] = False
    fed = make_uneven(Batch(tokens, tokens.clone(), present=present), step=0)
    assert fed.present is not None
    assert (~fed.present).sum(1).tolist() == [0, 2, 1, 4]
    assert all(target == IGNORE_INDEX for target in fed.targets[1, 14:])
    last = make_uneven(Batch(tokens[2:], tokens[2:].clone()), step=0, shard=1)
    assert last.present is not None
    assert (~last.present).sum(1).tolist() == [1, 0]
    assert (last.targets[0] == fed.targets[2]).all()


def test_targets_that_are_numbers_stay_as_they_are() -> None:
    numbers = torch.rand(4, 16)
    fed = make_uneven(Batch(numbers, numbers.clone()), step=0)
    assert torch.equal(fed.targets, numbers)


def test_rows_of_several_documents_are_divided_at_different_places() -> None:
    tokens, positions = torch.arange(32).reshape(4, 8), (torch.arange(8) % 5).repeat(4, 1)
    fed = make_uneven(Batch(tokens, tokens, positions), step=0).positions
    assert fed is not None
    assert fed.tolist() == [
        [0, 0, 1, 2, 3, 0, 1, 2],
        [0, 1, 2, 3, 4, 0, 0, 1],
        [0, 1, 2, 3, 0, 0, 1, 2],
        [0, 1, 0, 1, 2, 0, 1, 2],
    ]
    last = make_uneven(Batch(tokens[3:], tokens[3:], positions[3:]), step=0, shard=3).positions
    assert last is not None
    assert last.tolist() == fed[3:].tolist()


def test_fp16_is_made_to_overflow_where_enough_steps_follow() -> None:
    overflowing = [ComparisonPlan(steps=steps, beyond=True).overflow for steps in (2, 4, 6, 40)]
    assert overflowing == [None, None, 1, 1]
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    overflow(parameter)
    assert parameter.grad.tolist() == [[float("inf"), 1], [1, 1]]
