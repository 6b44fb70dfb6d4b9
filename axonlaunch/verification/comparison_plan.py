"""How long a comparison is and what it covers, as the parent that has no torch can say it."""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.config import RunConfig

AFTER_CHECKPOINT = 2
"""Steps of a run that is resumed."""
EVALUATED_BATCHES = 2
"""Of held-out samples that the training loop evaluates after the last step."""
FIRST_SCALE = 2.0**15
"""Of fp16's loss, in place of 2**16: it grows once in what is compared, to no more than that."""


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """How long a comparison is.

    Attributes:
        steps: Optimizer steps.
        beyond: Whether an evaluation, a prediction and a checkpoint are compared too; the last two
            steps are then those of a run that is resumed, and done by the training loop.
        fp64: Whether the reference computes in float64.
        asked: The run as it is configured, before it was changed for a comparison; None: as it is.
    """

    steps: int
    beyond: bool = False
    fp64: bool = False
    asked: RunConfig | None = None

    @property
    def saved(self) -> int:
        """Steps before the checkpoint, or before the last comparison of states."""
        return max(1, self.steps - AFTER_CHECKPOINT) if self.beyond else self.steps

    @property
    def trains_on(self) -> bool:
        """Whether a run is resumed from the checkpoint."""
        return self.beyond and self.saved < self.steps

    @property
    def growth_interval(self) -> int:
        """Steps without an overflow after which fp16's loss scale grows, in place of 2,000."""
        return max(1, self.steps // 2)

    @property
    def overflow(self) -> int | None:
        """Steps before the one in which fp16 is made to overflow; None: in none.

        The scale is halved in it, and grows once more in a step of the run that is resumed.
        """
        return 1 if self.beyond and self.growth_interval + 2 < self.steps else None

    @property
    def halfway(self) -> int:
        """Steps before the evaluation."""
        return self.saved // 2
