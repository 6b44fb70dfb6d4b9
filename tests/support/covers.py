"""Which of many cases every test run has; the others are slow: ``scripts/test --all`` has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(n: int, cases: Iterable[Any], *, start: int = 0) -> list[Any]:
    """Return all cases, of which each nth is fast.

    Args:
        n: 2: every other one.
        cases: Values of one parameter, tuples of several, or what ``pytest.param`` made of either.
        start: The first that is fast. Tests that share a list of cases begin at different ones, so
            that together they have all of them.
    """
    return [_case(case, is_fast=i % n == start) for i, case in enumerate(cases)]


def pairs(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Return all pairs, of which each row's is fast with one column, those in turn.

    Where there are as many rows as columns or more, every column is fast with a row.
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
