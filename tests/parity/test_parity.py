"""A layout changes where computation runs, never its result: one process is the reference.

Runs combinations of README.md in this folder.
"""

from __future__ import annotations

import itertools

import pytest
from support.parity import assert_trains_as_one_process
from support.parity_table import (
    BATCH,
    PAGE,
    Combination,
    combinations,
    combinations_in_every_run,
    combinations_in_tests,
    factors,
    markdown,
)


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(
            case,
            id=str(case),
            marks=() if case in combinations_in_every_run() else (pytest.mark.slow,),
        )
        for case in sorted(combinations_in_tests(), key=Combination.reference)
    ],
)
def test_combined_layouts_train_as_one_process_does(combination: Combination) -> None:
    common = [*combination.model_overrides, f"train.global_batch_size={BATCH}"]
    overrides = [*common, *combination.overrides]
    assert_trains_as_one_process(overrides, combination.layout.ranks, steps=combination.steps)


def test_page_lists_all_verify_comparisons() -> None:
    assert PAGE.read_text() == markdown(), "run python tests/support/parity_table.py"


def test_paired_combinations_have_every_pair_of_values_that_exists() -> None:
    def pairs(chosen: list[Combination]) -> set[object]:
        return {pair for c in chosen for pair in itertools.combinations(factors(c).items(), 2)}

    paired = [c for c in combinations() if c.paired]
    assert pairs(paired) == pairs(combinations())
    assert len(paired) <= len(combinations()) / 10


def test_every_test_run_has_each_row_and_model() -> None:
    chosen = combinations_in_every_run()
    assert {c.layout.label for c in chosen} == {c.layout.label for c in combinations()}
    assert {c.model for c in chosen} == {c.model for c in combinations()}
    assert {c.precision for c in chosen} == {"fp32", "bf16"}
