"""What ``verify`` found, as a plain record that a process without torch can read.

It holds numbers and words; ``verification`` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks

TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-6, "fp16": 2.0**-8}
"""Largest relative difference that rounding explains, by ``train.precision``: of bf16 four times,
of fp16 eight times the distance between 1 and the number next to it.
"""

# A gradient far smaller than the model's is judged beside this part of the model's usual size.
GRADIENT_FLOOR = 0.1
# Biases start near 0: beside weights of about this size, what is smaller is no difference.
PARAMETER_FLOOR = 0.02
# torch sums squares in fp32: it is 8e-5 off for a gradient of 4 million elements on a CPU.
_NORM_TOLERANCE = 1e-3


def tolerance_of(config: RunConfig) -> float:
    """Return the largest relative difference that passes, by the lowest precision in use."""
    train = config.train
    lowest = (train.precision, train.param_dtype, config.strategy.reduce_dtype)
    return max(TOLERANCES[precision] for precision in lowest)


def norm_tolerance(tolerance: float) -> float:
    """Return what passes for norms of the whole gradient, by what passes for a gradient."""
    return max(tolerance, _NORM_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """Whether a layout computes what one process does.

    Attributes:
        passed: Whether rounding explains every difference, and there could have been one.
        layout: The layout in words.
        steps: Optimizer steps that were compared.
        tolerance: Largest relative difference that passes; norms have ``norm_tolerance`` of it.
        max_loss_difference: Relative, over the steps.
        max_gradient_difference: Relative, over parameters, steps and ranks.
        max_norm_difference: Relative, of the norm of the whole gradient.
        max_parameter_difference: Relative, after the last step.
        worst_parameter: Where gradient or value differ most; None if nothing was compared.
        losses: One process's, by step.
        differences: What exceeds the tolerance, in words, the earliest first.
        failure: Why the layout could not run; None if it did.
        verdict: ``passed``, ``failed``, or ``nothing proved``, which is no pass.
        reason: Why nothing is proved; empty otherwise.
        max_differences: Relative, by kind of quantity.
        tolerances: What passes where the difference is largest, by kind of quantity.
        parameters: Of the model.
        parameters_with_gradient: Those that have one on both sides, and not one of zeros.
        parameters_moved: Those that the updates changed.
        unproved_parameters: Names of those trained that got no gradient, or did not move.
        frozen_parameters: Names of those that are not trained, and had no gradient on either side.
        features: How each feature was exercised, or that it was not.
        notes: What was not compared as the run would have it, or where it could have been.
        first_difference: The first module, in order of computation, whose output or gradient is
            not one process's in the first step, and how; empty where there is none.
    """

    passed: bool
    layout: str
    steps: int
    tolerance: float
    max_loss_difference: float = 0.0
    max_gradient_difference: float = 0.0
    max_norm_difference: float = 0.0
    max_parameter_difference: float = 0.0
    worst_parameter: str | None = None
    losses: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str | None = None
    verdict: Literal["passed", "failed", "nothing proved"] = "failed"
    reason: str = ""
    max_differences: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    parameters_with_gradient: int = 0
    parameters_moved: int = 0
    unproved_parameters: list[str] = field(default_factory=list)
    frozen_parameters: list[str] = field(default_factory=list)
    features: dict[str, str] = field(default_factory=dict)
    first_difference: str = ""
    notes: list[str] = field(default_factory=list)


def failed_result(config: RunConfig, steps: int, why: str) -> ParityResult:
    """Return the verdict on a layout that could not run to its end."""
    return ParityResult(
        passed=False,
        layout=layout_of(config),
        steps=steps,
        tolerance=tolerance_of(config),
        failure=why,
    )


def layout_of(config: RunConfig) -> str:
    """Return the layout in words."""
    return str(Layout.of(config, world_size=num_ranks(config)))


ProofOutcome = Literal["proved", "proved before", "to be proved", "not proved"]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known of a layout before its first step.

    Attributes:
        layout: In words.
        outcome: Whether it gives one process's losses and gradients.
        seconds: That it took to know.
        parameters: Of the small model that was compared; 0 where none was.
        reason: Why it is not proved; empty where it is.
    """

    layout: str
    outcome: ProofOutcome = "not proved"
    seconds: float = 0.0
    parameters: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"not proved: {self.reason}; axonlaunch verify with the same arguments proves it"
        what = f"{self.layout} gives one process's losses and gradients"
        if self.outcome == "to be proved":
            return f"to be proved: {what} (a small model, {self.parameters:,} parameters)"
        if self.outcome == "proved before":
            return f"proved before: {what} ({self.seconds:.1f} s to know)"
        how = f"a small model of the same architecture, {self.parameters:,} parameters"
        return f"proved: {what} ({how}, {self.seconds:.1f} s)"
