"""Selects the cases that every test run has. ``scripts/test --all`` runs the others, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(n: int, cases: Iterable[Any], *, start: int = 0) -> list[Any]:
    """Mark all cases but every nth one as slow.

    Args:
        n: 2 makes every other case fast.
        cases: Values of one parameter, tuples of several, or results of ``pytest.param``.
        start: Index of the first fast case. Tests that share a list of cases start at different
            indices, so that together they run all of them.
    """
    return [_case(case, is_fast=i % n == start) for i, case in enumerate(cases)]


def pairs(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Return all pairs; for each row one pair is fast, with the columns in turn.

    If there are no fewer rows than columns, every column is in a fast pair.
    """
    return [
        _case((row, column), is_fast=i % len(columns) == j)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def _case(case: Any, *, is_fast: bool) -> Any:
    slow = () if is_fast else (pytest.mark.slow,)
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=(*case.marks, *slow), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
