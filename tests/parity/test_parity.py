"""A layout changes where work happens, never what is computed: one process is the reference.

Every combination of README.md beside it; those that are not fast run under ``scripts/test --all``.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from parity import Trained, assert_same, train
from parity_table import BATCH, PAGE, Combination, combinations, factors, markdown

TOLERANCES = {
    "fp32": {"tolerance": 1e-5},
    "bf16": {"tolerance": 0.02, "parameters": 0.05, "gradients": 0.15, "gradient_steps": 1},
}
"""bf16 has 8 bits, and micro-batches of other sizes round their gradients otherwise. AdamW moves an
element by the learning rate however small its gradient, so rounding shows most in the biases.
"""


@functools.cache
def alone(model: tuple[str, ...], precision: str) -> Trained:
    common = [f"train.global_batch_size={BATCH}", f"train.precision={precision}"]
    return train([*model, *common, "strategy=single"], 1)


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(case, id=str(case), marks=() if case.fast else (pytest.mark.slow,))
        for case in combinations()
    ],
)
def test_it_trains_as_one_process_does(combination: Combination) -> None:
    expected = alone(tuple(combination.model_overrides), combination.precision)
    common = [*combination.model_overrides, f"train.global_batch_size={BATCH}"]
    got = train([*common, *combination.overrides], combination.layout.ranks)
    assert_same(got, expected, **TOLERANCES[combination.precision])


def test_the_page_lists_what_is_compared() -> None:
    assert PAGE.read_text() == markdown(), "run python tests/support/parity_table.py"


def test_every_test_run_has_every_pair_of_values_that_exists() -> None:
    def pairs(chosen: list[Combination]) -> set[object]:
        return {pair for c in chosen for pair in itertools.combinations(factors(c).items(), 2)}

    fast = [c for c in combinations() if c.fast]
    assert pairs(fast) == pairs(combinations())
    assert {c.layout.label for c in fast} == {c.layout.label for c in combinations()}
    assert len(fast) <= len(combinations()) / 10
