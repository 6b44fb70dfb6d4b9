"""The learning rates of a run as it is configured, which is longer than what is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator

from axonlaunch.config import RunConfig
from axonlaunch.engines.optimizer.optimizers import learning_rate
from axonlaunch.verification.plain_optimizer import plain_rate

_LOOKED_AT = 512
"""Steps, spread over the run."""
_SAME = 1e-9


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Yield the first step whose rate is not what the schedule's formula says.

    Args:
        config: Resolved; not changed for a comparison.
    """
    steps, peak = config.train.num_steps, config.optimizer.lr
    for step in sorted({*range(0, steps, max(1, steps // _LOOKED_AT)), steps - 1}):
        seen = learning_rate(config.scheduler, step, peak=peak, steps=steps)
        expected = plain_rate(config.scheduler, step, peak=peak, steps=steps)
        if not math.isclose(seen, expected, rel_tol=_SAME, abs_tol=_SAME * peak):
            yield (
                f"step {step + 1} of the run's {steps}: learning rate is {seen:.7g}, "
                f"not {expected:.7g}"
            )
            return
