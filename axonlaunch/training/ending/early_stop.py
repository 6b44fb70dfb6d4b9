"""Early stopping: counts evaluations since ``train.best_metric`` last improved."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class EvaluationHistory:
    """History of the evaluation loss or of a metric.

    Attributes:
        best: Best value so far; NaN if every value was NaN, None before the first evaluation.
        since: Number of evaluations after the one with the best value.
        higher_is_better: Whether a higher value is better.
    """

    best: float | None = None
    since: int = 0
    higher_is_better: bool = False

    def add(self, value: float) -> None:
        """Add the value of an evaluation. NaN is never an improvement."""
        is_first_number = self.best is not None and math.isnan(self.best) and not math.isnan(value)
        if self.best is None or is_first_number or self._is_better(value, self.best):
            self.best, self.since = value, 0
        else:
            self.since += 1

    def _is_better(self, value: float, best: float) -> bool:
        return value > best if self.higher_is_better else value < best

    def is_exhausted(self, patience: int | None) -> bool:
        """Return whether ``patience`` evaluations in a row have not improved the value.

        A patience of None never stops.
        """
        return patience is not None and self.since >= patience
