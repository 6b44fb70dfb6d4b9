"""Length and scope of a comparison. Imports no torch, so that the parent process can use it."""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.config import RunConfig

AFTER_CHECKPOINT = 2
"""Steps of the run that is resumed from the checkpoint."""
EVALUATED_BATCHES = 2
"""Held-out batches that the training loop evaluates after the last step."""
FIRST_SCALE = 2.0**15
"""Initial loss scale of fp16, half of the usual 2**16: it grows once during the comparison."""


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """Length and scope of a comparison.

    Attributes:
        steps: Number of optimizer steps.
        beyond: Whether an evaluation, a prediction and a checkpoint are compared too. The training
            loop then resumes from the checkpoint and runs the last two steps.
        fp64: Whether the reference computes in float64.
        original: Configuration before it was changed for the comparison; None skips the check of
            its learning rates.
    """

    steps: int
    beyond: bool = False
    fp64: bool = False
    original: RunConfig | None = None

    @property
    def saved(self) -> int:
        """Number of steps before the checkpoint, or before states are compared."""
        return max(1, self.steps - AFTER_CHECKPOINT) if self.beyond else self.steps

    @property
    def trains_on(self) -> bool:
        """Whether training resumes from the checkpoint."""
        return self.beyond and self.saved < self.steps

    @property
    def growth_interval(self) -> int:
        """Steps without overflow after which the fp16 loss scale grows (2,000 in training)."""
        return max(1, self.steps // 2)

    @property
    def overflow(self) -> int | None:
        """Index of the step in which an fp16 overflow is caused, from 0; None causes none.

        The step halves the scale, which grows again in a step after the resume.
        """
        return 1 if self.beyond and self.growth_interval + 2 < self.steps else None

    @property
    def halfway(self) -> int:
        """Number of steps before the evaluation."""
        return self.saved // 2
