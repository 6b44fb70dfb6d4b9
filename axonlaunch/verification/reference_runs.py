"""Runs the reference more than once: where its runs differ is rounding, or a random model.

It computes nothing of a step; that is ``reference``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.optimizer import MuonConfig
from axonlaunch.verification.comparison_plan import ComparisonPlan
from axonlaunch.verification.plain_model import leaving_no_trace
from axonlaunch.verification.reference import REFERENCE_DTYPES, NoReferenceError, PlainRun
from axonlaunch.verification.reference_values import Reference
from axonlaunch.verification.tolerances import FEW_STEPS

_DRAWS = 3
"""Of roundings in low precision, or over many steps, where there are few numbers: a unit of ReLU
that is on in one rounding and off in another changes a gradient at once by several per cent, or
there is none; and by step 8 at a large rate one rounding may make 50 times of another.
"""
_FEW_PARAMETERS = 2**20


def gradient_norms(config: RunConfig, *, steps: int) -> list[float]:
    """Return the norm of the whole gradient in each of the first steps.

    Raises:
        NoReferenceError: They fail.
    """
    with _reporting(), leaving_no_trace(config):
        run = PlainRun(config, ComparisonPlan(steps=steps))
        return [run.step(number).norm for number in range(steps)]


def run_references(config: RunConfig, plan: ComparisonPlan) -> tuple[Reference, ...]:
    """Run some steps in plain torch, and again from weights that are rounded otherwise.

    What the first and the others differ by is what rounding alone makes of this model, step by
    step. Where it is in float64, one other has the same weights and computes as the run does.

    Raises:
        NoReferenceError: They fail, or the model is random by itself.
    """
    with _reporting(), leaving_no_trace(config):
        plain = PlainRun(config, plan)
        plain.refuse_problems()
        reference = plain.run()
        _refuse_random(reference, PlainRun(config, plan))
        if plan.fp64:
            return reference, PlainRun(config, replace(plan, fp64=False)).run()
        rough = _roughness(config)
        is_low = rough > torch.finfo(torch.float32).eps
        count = sum(start.numel() for start in reference.start.values())
        # Muon rounds to bf16 in each update, whatever the run computes in.
        is_low = is_low or isinstance(config.optimizer, MuonConfig)
        is_rough = is_low or plan.steps > FEW_STEPS
        draws = _DRAWS if is_rough and count < _FEW_PARAMETERS else 1
        runs = (PlainRun(config, plan, roughness=rough, draw=draw) for draw in range(draws))
        return reference, *(run.run() for run in runs)


@contextmanager
def _reporting() -> Iterator[None]:
    """Report what fails inside as what one process does without the layout."""
    try:
        yield
    except NoReferenceError:
        raise
    except Exception as error:
        message = f"one process fails, without the layout: {type(error).__name__}: {error}"
        raise NoReferenceError(message) from error


def _refuse_random(reference: Reference, again: PlainRun) -> None:
    """Run the first step another time.

    Raises:
        NoReferenceError: It gives something else.
    """
    expected, seen = reference.steps[0], again.step(0)
    if not math.isfinite(expected.loss):
        raise NoReferenceError(f"the first loss of one process is {expected.loss}")
    same = all(_is_same(expected.gradients[n], g) for n, g in seen.gradients.items())
    if seen.loss != expected.loss or not same:
        raise NoReferenceError(
            f"the model is random by itself: of the same weights and samples one process has a "
            f"loss of {expected.loss:.7g}, then of {seen.loss:.7g}; let it draw nothing in "
            "training, also not by numpy or Python's random"
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are equal, also where fp16 overflowed."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _roughness(config: RunConfig) -> float:
    """Return the distance of two neighbours of 1 in the lowest precision in use."""
    train = config.train
    lowest = (train.precision, train.param_dtype, config.strategy.reduce_dtype)
    return max(torch.finfo(REFERENCE_DTYPES[name]).eps for name in lowest)
