"""Result of ``verify`` and of layout proofs. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of

# Differences of gradients far smaller than the model's are relative to this fraction of its RMS.
GRADIENT_FLOOR = 0.1
# Differences of parameters are relative to at least this size, because biases start near 0.
PARAMETER_FLOOR = 0.02
# torch sums squares in fp32, with an error of 8e-5 for a gradient of 4 million elements on a CPU.
_NORM_TOLERANCE = 1e-3


def tolerance_of(config: RunConfig) -> float:
    """Return the base tolerance of the lowest precision in use."""
    return precision_of(config).lowest.tolerance


def norm_tolerance(tolerance: float) -> float:
    """Return the tolerance of gradient norms, given that of gradients."""
    return max(tolerance, _NORM_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """Result of comparing a layout with one process.

    Attributes:
        passed: Whether rounding explains every difference and the comparison could have failed.
        layout: Layout in words.
        steps: Number of optimizer steps that were compared.
        tolerance: Base tolerance, relative; gradient norms have ``norm_tolerance`` of it.
        max_loss_difference: Largest relative difference of losses over the steps.
        max_gradient_difference: Largest relative difference over parameters, steps and ranks.
        max_norm_difference: Largest relative difference of the gradient norm.
        max_parameter_difference: Largest relative difference after the last step.
        worst_parameter: Parameter with the largest difference of gradient or value; None if
            nothing was compared.
        losses: Losses of one process by step.
        differences: Descriptions of differences above the tolerance, the earliest first.
        failure: Reason why the layout or the reference could not run; None if both ran.
        verdict: ``passed``, ``failed``, or ``nothing proved`` if the comparison could not have
            failed.
        reason: Reason why nothing is proved; empty otherwise.
        max_differences: Largest relative differences by kind of quantity.
        tolerances: Tolerances at the largest differences, by kind of quantity.
        parameters: Number of parameter tensors of the model.
        parameters_with_gradient: Number of parameters with a nonzero gradient in one process and a
            gradient in the layout.
        parameters_moved: Number of parameters that the updates changed.
        unproved_parameters: Names of trained parameters without a gradient or without a change.
        frozen_parameters: Names of parameters that are not trained and had no gradient.
        features: Description of how each feature was exercised, or that it was not.
        notes: Remarks on quantities that were compared differently than a run computes them.
        first_difference: First module, in order of computation, with a wrong output, gradient or
            update, and the difference; empty without differences.
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
    """Return the result of a layout that could not complete its steps."""
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
    """Result of comparing a layout with one process before the first step.

    Attributes:
        layout: Layout in words.
        outcome: Whether the layout has the losses and gradients of one process.
        seconds: Duration of the comparison or of its lookup.
        parameters: Number of parameters of the small model that was compared; 0 without one.
        reason: Reason why the layout is not proved; empty if it is.
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
