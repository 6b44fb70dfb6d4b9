"""Intervals of ``train.eval_every`` and ``checkpoint.every``: steps, epochs or listed steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

StepInterval = int | str | list[int]
"""A number of steps (0: never), a number of epochs as in ``"0.5 epoch"``, or a list of steps."""
_EPOCHS = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*epochs?\s*")


def epochs_of(interval: StepInterval) -> Fraction | None:
    """Return an interval's number of epochs; None if it is not a positive number of epochs."""
    match = _EPOCHS.fullmatch(interval) if isinstance(interval, str) else None
    return (Fraction(match[1]) or None) if match else None


def is_due(interval: StepInterval, step: int, *, epoch: Callable[[int], Fraction]) -> bool:
    """Return whether an interval ends with a step.

    An interval in epochs ends with the step that reads its last sample, so its length in steps may
    alternate: half an epoch of 15 steps ends with steps 8, 15, 23 and 30.

    Args:
        interval: Checked interval.
        step: Number of the step, from 1.
        epoch: Maps a number of steps to the number of epochs that they read.
    """
    if isinstance(interval, list):
        return step in interval
    if isinstance(interval, int):
        return interval > 0 and step % interval == 0
    length = epochs_of(interval)
    assert length is not None
    return epoch(step) // length > epoch(step - 1) // length
