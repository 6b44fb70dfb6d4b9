"""Runs the reference several times to measure rounding and to find random models.

``reference`` computes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.optimization.optimizer import MuonConfig
from axonlaunch.config.precision import rounds_states
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import compare_numbers, compare_tensors
from axonlaunch.verification.references.plain_model import (
    has_drawn_numbers,
    preserving_global_state,
    reference_device,
)
from axonlaunch.verification.references.reference import NoReferenceError, PlainRun
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.references.tolerances import FEW_STEPS, floors
from axonlaunch.verification.result import tolerance_of

_DRAWS = 3
"""Number of perturbed runs of small models in low precision or over many steps.

A ReLU unit can be on in one run and off in another. This changes a gradient by several per cent at
once, or it does not happen. By step 8 at a large learning rate, the effect of one perturbation can
be 50 times that of another.
"""
_SEEDS = 20
"""Number of seeds for which the first step must be the same if random numbers have no effect."""
_TIMES_REPEATED = 8.0
"""Allowed multiple of the difference between two GPU runs with the same seed."""
_FEW_PARAMETERS = 2**20
_ROUNDS_OTHERWISE = 2.0**-20
"""Relative perturbation of weights if factors of products or states are rounded: 8 times fp32's
epsilon.

A sum in another order, 1e-7, changes the rounding of one in 10^6 factors by 6%, which changes the
rounding of others. In a small model this happens in some layouts only, and should then happen in
the perturbed references too. From 2^-18 on, their noise hides gradients in e4m3 in place of e5m2.
"""


def gradient_norms(config: RunConfig, *, steps: int) -> list[float]:
    """Return the norm of the full gradient in each of the first steps.

    Raises:
        NoReferenceError: A step failed.
    """
    with _reporting(), preserving_global_state(config):
        run = PlainRun(config, ComparisonPlan(steps=steps))
        return [run.step(number).norm for number in range(steps)]


def run_references(config: RunConfig, plan: ComparisonPlan) -> tuple[Reference, ...]:
    """Run the steps in plain torch, and again from weights with perturbations of rounding size.

    The differences between the first and the other references show the effect of rounding in this
    model, step by step. If the first computes in float64, the only other one has the same weights
    and computes in the run's precision.

    Raises:
        NoReferenceError: A step failed, a check failed, or the model is random.
    """
    with _reporting(), preserving_global_state(config):
        plain = PlainRun(config, plan)
        plain.refuse_problems()
        reference = plain.run()
        _refuse_random(config, reference, PlainRun(config, plan))
        choices = [step.choices for step in reference.steps]
        if plan.fp64:
            return reference, PlainRun(config, replace(plan, fp64=False), choices=choices).run()
        epsilon = _machine_epsilon(config)
        is_low = epsilon > torch.finfo(torch.float32).eps
        count = sum(start.numel() for start in reference.start.values())
        # Muon rounds to bf16 in each update, in every precision.
        is_low = is_low or isinstance(config.optimizer, MuonConfig)
        is_rough = is_low or plan.steps > FEW_STEPS
        draws = _DRAWS if is_rough and count < _FEW_PARAMETERS else 1
        runs = (
            PlainRun(config, plan, roughness=epsilon, draw=draw, choices=choices)
            for draw in range(draws)
        )
        return reference, *(run.run() for run in runs)


@contextmanager
def _reporting() -> Iterator[None]:
    """Convert exceptions to ``NoReferenceError``, because they occur without a layout."""
    try:
        yield
    except NoReferenceError:
        raise
    except Exception as error:
        message = f"one process fails, without the layout: {type(error).__name__}: {error}"
        raise NoReferenceError(message) from error


def _refuse_random(config: RunConfig, reference: Reference, again: PlainRun) -> None:
    """Run the first step again, with the same seed and, if the model draws numbers, with others.

    Random numbers may be without effect: routers of Phimoe draw them even if their configuration
    does not use them. Equal operations give equal results on CPUs. On GPUs, some operations sum in
    a random order, so that results differ by rounding errors.

    Raises:
        NoReferenceError: The results differ by more than rounding, or the loss is not finite.
    """
    first, device = reference.steps[0], reference_device(config)
    if not math.isfinite(first.loss):
        raise NoReferenceError(f"the first loss of one process is {first.loss}")
    is_exact = device.type == "cpu"
    loss, gradients = again.first_gradients(seed=config.seed)
    has_drawn = has_drawn_numbers(device, seed=config.seed)
    repeated = _relative_differences(reference, loss, gradients)
    allowed = 0.0 if is_exact else tolerance_of(config)
    if any(difference > allowed for difference in repeated.values()):
        raise NoReferenceError(
            f"the model is random: with the same weights and samples one process has a loss of "
            f"{first.loss:.7g}, then of {loss:.7g}; it must not use random numbers in training, "
            "including numpy's and Python's"
        )
    for seed in range(_SEEDS) if has_drawn else ():
        differences = _relative_differences(reference, *again.first_gradients(seed=seed))
        if any(
            difference > max(allowed, _TIMES_REPEATED * repeated.get(name, 0.0))
            for name, difference in differences.items()
        ):
            raise NoReferenceError(
                "the model draws random numbers in training, which differ between layouts; "
                "turn this off in model.arguments (verify turns nn.Dropout off itself)"
            )


def _relative_differences(
    reference: Reference, loss: float, gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the differences from the reference's first step, by parameter; ``""`` is the loss.

    Overflowed elements are equal if they have the same sign.
    """
    first, floor = reference.steps[0], floors(reference, 0)
    if not math.isfinite(floor):
        floor = 0.0
    differences = dict.fromkeys(first.gradients.keys() ^ gradients.keys(), math.inf)
    differences[""] = compare_numbers(0, "loss", loss, first.loss).relative
    for name in first.gradients.keys() & gradients.keys():
        one, other = first.gradients[name], gradients[name]
        if torch.equal(one.nan_to_num(), other.nan_to_num()):
            differences[name] = 0.0
        else:
            quantity = (0, "gradient", name)
            differences[name] = compare_tensors(quantity, other, one, floor=floor).relative
    return differences


def _machine_epsilon(config: RunConfig) -> float:
    """Return the machine epsilon of the lowest precision in use.

    If factors of products or states are rounded, it is at least a size that changes the rounding
    of some.
    """
    precision = precision_of(config)
    rounds = precision.products is not None or rounds_states(config.optimizer)
    least = _ROUNDS_OTHERWISE if rounds else 0.0
    return max(2 * precision.lowest.roundoff, least)
