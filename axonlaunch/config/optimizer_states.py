"""What each optimizer keeps of a parameter: the one table that everybody else reads.

It describes tensors and makes none; ``axonlaunch.engines.optimizer.optimizers`` allocates them.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.config.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """One tensor that an optimizer keeps of each parameter.

    Attributes:
        name: torch's key of it in ``optimizer.state[parameter]``.
        elementwise: Whether it has the parameter's shape and dtype; otherwise it is one fp32
            number a parameter, on every rank that holds a part of it.
        absent_at_zero: The configuration's field without which there is no such state; None: it
            is always there.
    """

    name: str
    elementwise: bool = True
    absent_at_zero: str | None = None


OPTIMIZER_STATES: dict[str, tuple[OptimizerState, ...]] = {
    "adamw": (
        OptimizerState(name="step", elementwise=False),
        OptimizerState(name="exp_avg"),
        OptimizerState(name="exp_avg_sq"),
    ),
    "sgd": (OptimizerState(name="momentum_buffer", absent_at_zero="momentum"),),
}


def optimizer_states(config: OptimizerConfig) -> tuple[OptimizerState, ...]:
    """Return what a configured optimizer keeps of each parameter."""
    return tuple(
        state
        for state in OPTIMIZER_STATES[config.name]
        if state.absent_at_zero is None or getattr(config, state.absent_at_zero) != 0
    )


def states_per_element(config: OptimizerConfig) -> int:
    """Return how many numbers of its dtype are kept of each element of a parameter.

    AdamW: 2. SGD: 1, or 0 without momentum. The one number a parameter that AdamW counts its
    steps with is not among them.
    """
    return sum(state.elementwise for state in optimizer_states(config))
