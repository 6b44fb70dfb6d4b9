"""A schedule: linear warm-up, then the inverse square root (Vaswani et al., 2017, section 5.3)."""

from __future__ import annotations

import axonlaunch as ax


@ax.register_scheduler("inverse_root")
def inverse_root(step: int, steps: int, warmup: int = 100) -> float:
    """Rise linearly, then fall with the inverse root of the step."""
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
