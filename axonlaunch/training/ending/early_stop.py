"""Early stopping: counts evaluations since the loss last improved."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class EvaluationHistory:
    """History of the evaluation loss.

    Attributes:
        best: Lowest loss so far; NaN if every loss was NaN, None before the first evaluation.
        since: Number of evaluations after the one with the lowest loss.
    """

    best: float | None = None
    since: int = 0

    def add(self, loss: float) -> None:
        """Add the loss of an evaluation. NaN is never an improvement."""
        is_first_number = self.best is not None and math.isnan(self.best) and not math.isnan(loss)
        if self.best is None or is_first_number or loss < self.best:
            self.best, self.since = loss, 0
        else:
            self.since += 1

    def is_exhausted(self, patience: int | None) -> bool:
        """Return whether ``patience`` evaluations in a row have not improved the loss.

        A patience of None never stops.
        """
        return patience is not None and self.since >= patience
