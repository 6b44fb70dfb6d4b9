"""When training ends because its evaluations stopped getting better.

It counts; the loop evaluates and ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class EvaluationHistory:
    """What evaluations found so far.

    Attributes:
        best: The lowest loss, not a number until one is; None without an evaluation.
        since: Evaluations after the one that found it.
    """

    best: float | None = None
    since: int = 0

    def add(self, loss: float) -> None:
        """Note an evaluation; one that is not a number is no better than any."""
        is_first_number = self.best is not None and math.isnan(self.best) and not math.isnan(loss)
        if self.best is None or is_first_number or loss < self.best:
            self.best, self.since = loss, 0
        else:
            self.since += 1

    def is_exhausted(self, patience: int | None) -> bool:
        """Say whether so many evaluations in a row have found no lower loss; None: no number is."""
        return patience is not None and self.since >= patience
