"""Tolerances for each quantity and step, from the precision and from measured rounding.

A quantity passes within the base tolerance of the lowest precision in use, or within a multiple of
its measured noise. The noise is the difference between two references with weights that differ by
rounding errors. It grows with the steps, as rounding errors do in the run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.verification.references.differences import (
    Difference,
    compare_numbers,
    compare_tensors,
    root_mean_square,
)
from axonlaunch.verification.references.plain_rounding import StateRounding, state_rounding
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.result import (
    GRADIENT_FLOOR as GRADIENT_FLOOR,
    PARAMETER_FLOOR as PARAMETER_FLOOR,
    norm_tolerance,
    tolerance_of,
)

TIMES = {False: 8.0, True: 4.0}
"""Allowed multiple of the measured noise, in fp32 (False) and in lower precision (True).

Rounded states count as lower precision, because their noise is that of larger perturbations.

A layout sums partial results in a different order and can therefore round more.
"""
_LOSS_DIVISOR = 8.0
"""Divisor of the base tolerance for losses in low precision; they are means of many numbers."""
FACTOR_BASE = 0.01
"""Base tolerance for the length of gradients in low precision.

Rounding errors have random directions, so the length of a gradient hardly changes. A wrong factor
changes it.
"""
_SMALL_FACTOR_BASE = 0.04
"""The same for gradients with few elements after the first update: errors do not cancel there."""
_ROUNDED_FACTOR_BASE = 0.1
"""The same for products of factors in 8 bits, whose gradients differ by up to 0.2 of their size."""
_FEW = 2**10
_STATISTICS_FACTOR = 10.0
"""Factor for the last evaluation of models with running statistics.

The statistics lag behind the bias before a batch normalization, which removes this bias, so that
only rounding errors change it.
"""
_SAME_OPERATIONS = 2.0**-11
"""bf16: tolerance of first-step gradients if a layout runs the reference's operations on the same
rows. Only an fp32 sum over ranks differs, by 1e-7. A sum in bf16 would differ by 1e-3.
"""
SUM_TOLERANCE = 6e-5
"""Tolerance of sums of 16-bit gradients, relative to their terms. In fp32 they are off by 1e-7, and
in fp16 by up to 4e-5, because halves of its smallest numbers are rounded. Sums in fp16 would be off
by 1e-4, sums in bf16 by 1e-3.
"""
_MAX_SAME_OPERATIONS = 0.25
"""Largest tolerance of later steps in this case.

Sums over ranks round a few elements to a neighboring bf16 number. This changes gradients less than
the perturbation of all weights: by 0.04 compared with 0.2 in step 4 of a model with 4 layers of
width 32. All steps are therefore compared.
"""
_JUMP = 4.0
"""Ratio between the noise of two references that shows ReLU units on in one and off in the other.

This happens in some steps only, and can also happen in the layout.
"""
_ONLY_ROUNDING = 0.5
"""Relative difference of a first-step gradient that shows it to consist of rounding errors.

An example is the gradient of a bias before batch normalization, which removes every constant.
"""
FEW_STEPS = 6
"""Largest number of steps over which perturbed runs of a small model stay close at large rates."""
_LENGTH = "length"
"""Kind of quantity: the length of a gradient."""
_EXACT = {
    *("order", "steps", "logged", "evaluated", "rate", "skip", "counted", "seen", "scale"),
}
"""Kinds of numbers without rounding errors."""
_MAX_NOISE = {False: 1e-2, True: 0.5}
"""Largest noise of gradients that are compared, in fp32 (False) and in lower precision (True)."""


class Tolerances:
    """Tolerances of one comparison."""

    def __init__(
        self, config: RunConfig, reference: Reference, others: Sequence[Reference]
    ) -> None:
        """Measure the noise of rounding.

        Args:
            config: Configuration of the layout.
            reference: Reference that ranks are compared with.
            others: References from weights with perturbations of rounding size.
        """
        self.base = tolerance_of(config)
        self._rounds_factors = precision_of(config).products is not None
        self._is_low = self.base > 1e-4 or self._rounds_factors
        self._lags_at = len(reference.steps) if reference.buffers and not self._is_low else None
        self._sizes = {name: start.numel() for name, start in reference.start.items()}
        self._has_same_operations = _has_same_operations(config, reference)
        self._state_rounding: StateRounding | None = None
        if not _is_fp64(reference):
            floors_of = state_floors(reference.states)
            self._state_rounding = state_rounding(config, reference, floors=floors_of)
        self._times = TIMES[self._is_low or self._state_rounding is not None]
        self._noise: dict[tuple[int, str, str], float] = {}
        median_noise: dict[tuple[int, str], list[float]] = {}
        for other in others:
            noise = dict(_relative_noise(reference, other))
            for key, relative in noise.items():
                self._noise[key] = max(relative, self._noise.get(key, 0.0))
            for step, kind in {(step, kind) for step, kind, _ in noise}:
                same = [n for key, n in noise.items() if key[:2] == (step, kind)]
                median_noise.setdefault((step, kind), []).append(statistics.median(same))
        self._median_noise = {key: max(of_each) for key, of_each in median_noise.items()}
        max_noise = _MAX_NOISE[self._is_low]
        chaotic = [
            step
            for (step, kind), of_each in median_noise.items()
            if kind in ("loss", "gradient", "parameter")
            and statistics.median(of_each) * self._times > max_noise
        ]
        # If rounding determines whether fp16 overflows, later steps cannot be compared.
        skips = [[step.skipped for step in run.steps] for run in (reference, *others)]
        of_runs = enumerate(zip(*skips, strict=True), start=1)
        chaotic += [number for number, skipped in of_runs if len({*skipped}) > 1]
        if self._has_same_operations:
            chaotic = []
        self.last_step = min(chaotic, default=len(reference.steps) + 1) - 1
        """Last step that is compared; in later steps the noise is too large."""
        self._noise = {key: n for key, n in self._noise.items() if key[0] <= self.last_step}
        self._median_noise = {
            key: n for key, n in self._median_noise.items() if key[0] <= self.last_step
        }
        _make_monotonic(self._noise)
        _make_monotonic(self._median_noise)
        self._largest_noise: dict[int, float] = {}
        for (step, kind, _), of_tensor in self._noise.items():
            if kind == "gradient":
                self._largest_noise[step] = max(of_tensor, self._largest_noise.get(step, 0.0))
        # Independent of ReLU units, the noise of references differs over many fp32 steps, and if a
        # state is rounded to another neighbor in only one of them.
        has_few_steps = len(reference.steps) <= FEW_STEPS and self._state_rounding is None
        has_jumps = self._is_low or has_few_steps
        of_gradients = [median_noise[key] for key in self._median_noise if key[1] == "gradient"]
        if has_jumps and any(max(of) > _JUMP * min(of) for of in of_gradients):
            self._use_largest_noise_in_every_step()

    def _use_largest_noise_in_every_step(self) -> None:
        """Use the largest noise of a gradient over all steps, also for its optimizer states."""
        for kind in ("gradient", _LENGTH):
            most: dict[str, float] = {}
            for (_, of_kind, name), noise in self._noise.items():
                if of_kind == kind:
                    most[name] = max(noise, most.get(name, 0.0))
            for step, of_kind, name in self._noise:
                owner = name.rpartition(".")[0] if of_kind == "state" else name
                if of_kind == kind or (of_kind == "state" and kind == "gradient"):
                    key = (step, of_kind, name)
                    self._noise[key] = max(self._noise[key], most.get(owner, 0.0))
            median_noise = max(noise for key, noise in self._median_noise.items() if key[1] == kind)
            self._median_noise |= {
                key: median_noise for key in self._median_noise if key[1] == kind
            }

    def for_difference(self, difference: Difference) -> float:
        """Return the tolerance of a difference's quantity."""
        kind, name = difference.kind, difference.name
        if kind in _EXACT:
            return 1e-9
        if kind == "sum":
            return SUM_TOLERANCE
        if self._has_same_operations and (difference.step, kind) == (1, "gradient"):
            return _SAME_OPERATIONS
        base = norm_tolerance(self.base) if kind == "norm" else self.base
        if self.base > 1e-4 and kind in ("loss", "evaluation"):
            base /= _LOSS_DIVISOR
        if kind == "evaluation" and difference.step == self._lags_at:
            base *= _STATISTICS_FACTOR
        if kind == "choice":  # scores round like gradients
            kind, name = "gradient", ""
        if kind == "checkpoint":  # tolerance of the saved quantity
            section, _, name = name.partition(".")
            kind = "state" if section == "optimizer" else "parameter"
            if (difference.step, "buffer", name) in self._noise:
                kind = "buffer"
        rounding = self._times * self._rounding(difference.step, kind, name)
        if self._has_same_operations:
            rounding = min(rounding, _MAX_SAME_OPERATIONS)
        measured = max(base, rounding)
        if self._state_rounding is None or kind not in ("gradient", "parameter", "state"):
            return measured
        quantity = replace(difference, kind=kind, name=name)
        return self._with_rounded_states(quantity, self._state_rounding, measured)

    def _with_rounded_states(
        self, difference: Difference, rounded: StateRounding, measured: float
    ) -> float:
        """Return the tolerance of a gradient, a parameter or a state if states are rounded.

        In fp32, these differences are due to single elements, which can be rounded to another
        neighbor in any state. Later gradients then have the largest noise of all gradients.

        Args:
            difference: Difference of the quantity.
            rounded: Effect of the rounding.
            measured: Tolerance by the measured noise of this quantity.
        """
        step, kind, name = difference.step, difference.kind, difference.name
        parameter = name.rpartition(".")[0] if kind == "state" else name
        unrounded = max(self.base, self._times * self._rounding(step, "gradient", parameter))
        if kind == "state" and name in rounded:
            least = measured if self._is_low else unrounded
            return max(least, rounded.allowed_in_state(name, unrounded, count=difference.count))
        if self._is_low:
            return measured
        of_gradients = max(self.base, self._times * self._largest_noise.get(step, 0.0))
        if kind == "parameter":
            moved = rounded.allowed_in_parameter(
                name, step, unrounded=unrounded, gradient=of_gradients, count=difference.count
            )
            return max(measured, self.base + moved)
        return max(measured, of_gradients)

    def allows(self, difference: Difference) -> bool:
        """Return whether rounding explains a difference."""
        if not difference.relative <= self.for_difference(difference):
            return False
        if not self._is_low or difference.kind != "gradient" or difference.ratio is None:
            return True
        step, name = difference.step, difference.name
        rounding = self._times * self._rounding(step, _LENGTH, name)
        base = _ROUNDED_FACTOR_BASE if self._rounds_factors else FACTOR_BASE
        if difference.count < _FEW:
            # A ReLU unit that is on in only one of two runs changes the gradient in one direction.
            # In a rank's part this has a larger weight than in the full gradient.
            share = difference.count / self._sizes.get(name, difference.count)
            rounding = max(rounding, self._rounding(step, "gradient", name) / math.sqrt(share))
            base = max(base, _SMALL_FACTOR_BASE) if step > 1 else base
        return abs(difference.ratio - 1) <= max(base, rounding)

    def _rounding(self, step: int, kind: str, name: str) -> float:
        """Return the larger of the quantity's noise and the median noise of its kind."""
        return max(
            self._noise.get((step, kind, name), 0.0), self._median_noise.get((step, kind), 0.0)
        )


def _make_monotonic(noise: dict[Any, float]) -> None:
    """Raise the noise of each step to the largest of earlier steps, in place."""
    largest: dict[Any, float] = {}
    for key in sorted(noise):
        _, *quantity = key
        so_far = max(noise[key], largest.get(tuple(quantity), 0.0))
        noise[key] = largest[tuple(quantity)] = so_far


def floors(reference: Reference, number: int) -> float:
    """Return the lower bound for the size of elements of a step's gradients."""
    return GRADIENT_FLOOR * root_mean_square(reference.steps[number].gradients.values())


def state_floors(states: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the lower bound for the size of elements of optimizer states, by kind of state."""
    kinds: dict[str, list[Tensor]] = {}
    for key, state in states.items():
        if state.numel() > 1:
            kinds.setdefault(key.rpartition(".")[2], []).append(state)
    return {kind: GRADIENT_FLOOR * root_mean_square(of) for kind, of in kinds.items()}


def _has_same_operations(config: RunConfig, reference: Reference) -> bool:
    """Return whether a bf16 layout rounds like the reference until ranks sum their gradients.

    Such a layout divides only samples, among a power of two of ranks, and sums in fp32. Trained
    parameters are fp32; the frozen weights of a model with an adapter may be bf16.
    """
    train, layout = config.train, Layout.of(config, world_size=num_ranks(config))
    precision = precision_of(config)
    is_trained_in_fp32 = not precision.parameters.is_low or config.adapter is not None
    is_mixed = precision.replica_arithmetic == "copies" and not precision.reduce.is_low
    is_mixed = is_mixed and is_trained_in_fp32 and precision.products is None
    divides_only_samples = max(layout.degrees.values()) == 1
    is_like_plain = not train.compile and not train.defers_head and config.launch.backend == "mock"
    is_power = layout.data_ranks & (layout.data_ranks - 1) == 0
    is_like_plain = is_like_plain and not _is_fp64(reference) and not reference.rereads_parameters
    is_like_plain = is_like_plain and not reference.num_experts  # computed one after another
    return is_mixed and divides_only_samples and is_like_plain and is_power


def _is_fp64(reference: Reference) -> bool:
    return any(p.dtype is torch.float64 for p in reference.start.values())


def _relative_noise(
    one: Reference, other: Reference
) -> Iterable[tuple[tuple[int, str, str], float]]:
    """Yield relative differences of two references with step, kind and name."""
    for noise in _differences_between(one, other):
        yield (noise.step, noise.kind, noise.name), noise.relative
        if noise.kind == "gradient" and noise.ratio is not None:
            yield (noise.step, _LENGTH, noise.name), abs(noise.ratio - 1)


def _gradients_of_rounding(one: Reference, other: Reference) -> set[str]:
    """Return names of parameters with gradients that are zero except for rounding errors.

    The difference of two references underestimates the noise of such a gradient, which is as large
    as the gradient itself.
    """
    first, second = one.steps[0], other.steps[0]
    if first.skipped or second.skipped:
        return set()
    return {
        name
        for name, gradient in first.gradients.items()
        if name in second.gradients
        and (gradient - second.gradients[name]).norm() > _ONLY_ROUNDING * gradient.norm()
    }


def _differences_between(one: Reference, other: Reference) -> Iterable[Difference]:
    """Yield the differences from a reference with perturbed weights, which measure rounding."""
    zero = _gradients_of_rounding(one, other)
    for number, (step, expected_step) in enumerate(zip(other.steps, one.steps, strict=True)):
        if step.skipped != expected_step.skipped:
            continue
        yield compare_numbers(number, "loss", step.loss, expected_step.loss)
        if step.skipped:
            continue
        yield compare_numbers(number, "norm", step.norm, expected_step.norm)
        floor = floors(one, number)
        for name, gradient in step.gradients.items():
            if name not in expected_step.gradients:  # for example an expert without tokens
                continue
            expected = expected_step.gradients[name]
            if name in zero:
                size = torch.maximum(gradient.abs(), expected.abs())
                gradient = expected + size.to(expected.dtype)
            yield compare_tensors((number, "gradient", name), gradient, expected, floor=floor)
    saved, end = one.saved_step - 1, len(one.steps) - 1
    floors_of = state_floors(one.states)
    for name, value in other.parameters.items():
        quantity = (saved, "parameter", name)
        yield compare_tensors(quantity, value, one.parameters[name], floor=PARAMETER_FLOOR)
    if end != saved:
        for name, value in other.end.items():
            quantity = (end, "parameter", name)
            yield compare_tensors(quantity, value, one.end[name], floor=PARAMETER_FLOOR)
    for name, value in other.buffers.items():
        if value.is_floating_point():
            quantity = (saved, "buffer", name)
            yield compare_tensors(quantity, value, one.buffers[name], floor=PARAMETER_FLOOR)
    for name, value in other.states.items():
        if name not in one.states:  # fp16 skipped every step
            continue
        floor = floors_of.get(name.rpartition(".")[2], 0.0)
        yield compare_tensors((saved, "state", name), value, one.states[name], floor=floor)
    if one.end_evaluation is not None and other.end_evaluation is not None:
        yield compare_numbers(end, "evaluation", other.end_evaluation[0], one.end_evaluation[0])
    half = one.halfway - 1
    if one.evaluation is not None and other.evaluation is not None:
        yield compare_numbers(half, "evaluation", other.evaluation[0], one.evaluation[0])
    if one.prediction is not None and other.prediction is not None:
        yield compare_tensors((half, "prediction", ""), other.prediction, one.prediction, floor=0.0)
