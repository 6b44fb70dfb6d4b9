"""Checks the learning rates of the complete run against the formula of its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from axonlaunch.config import RunConfig
from axonlaunch.engines.optimizer.schedules import learning_rate
from axonlaunch.verification.references.plain_optimizer import plain_rate

_CHECKED = 512
"""Number of steps to check, spread over the run."""
_SAME = 1e-9


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Describe the first step with a wrong learning rate, if there is one.

    Args:
        config: Resolved configuration, before changes for a comparison.
    """
    steps, peak = config.train.num_steps, config.optimizer.lr
    for step in sorted({*range(0, steps, max(1, steps // _CHECKED)), steps - 1}):
        actual = learning_rate(config.scheduler, step, peak=peak, steps=steps)
        expected = plain_rate(config.scheduler, step, peak=peak, steps=steps)
        if not math.isclose(actual, expected, rel_tol=_SAME, abs_tol=_SAME * peak):
            yield (
                f"step {step + 1} of the run's {steps}: learning rate is {actual:.7g}, "
                f"not {expected:.7g}"
            )
            return
