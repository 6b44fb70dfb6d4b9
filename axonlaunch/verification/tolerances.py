"""What rounding explains, quantity by quantity and step by step.

A quantity passes within a base of the lowest precision in use, or within some times what rounding
alone makes of it: what two references differ by whose weights are rounded otherwise. That grows
with the steps as the run itself makes more of a rounded bit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.verification.differences import Difference, of_number, of_tensor
from axonlaunch.verification.reference_values import Reference
from axonlaunch.verification.result import GRADIENT_FLOOR as GRADIENT_FLOOR
from axonlaunch.verification.result import PARAMETER_FLOOR as PARAMETER_FLOOR
from axonlaunch.verification.result import norm_tolerance, tolerance_of

TIMES = {False: 8.0, True: 4.0}
"""By how much more than a reference a layout may round, in fp32 and in lower precision: it sums in
parts, in another order.
"""
_OF_LOSSES = 8.0
"""In lower precision: by how much less losses are off than gradients, as means of many numbers."""
FACTOR_BASE = 0.01
"""In low precision: what a gradient as a whole may be too large or too small by. Rounding goes in
all directions and so leaves a gradient's length nearly as it is, which a wrong factor does not."""
_FACTOR_OF_FEW = 0.04
"""The same of a gradient of few elements, once the first update has made weights differ: rounding
does not cancel out in it.
"""
_FEW = 2**10
_OF_STATISTICS = 10.0
"""By how much more the evaluation at the end may be off where a model keeps running statistics:
they lag behind a bias that batch normalisation takes away and that only rounding moves.
"""
_OF_SAME_OPERATIONS = 2.0**-11
"""In bf16: what a gradient of the first step may be off by where a layout runs the operations of
the reference on the same rows. All that is left is an fp32 sum over ranks, 1e-7; in bf16 it makes
1e-3.
"""
_MOST_OF_SAME_OPERATIONS = 0.25
"""The same in later steps. Sums over ranks move a few elements to the next number of bf16, which
moves gradients less than rounding all weights to bf16 otherwise: 0.04 by step 4 in a model of 4
layers of width 32, where the other is 0.2. So comparison never ends there.
"""
_JUMP = 4.0
"""By how much more one rounding makes of a step's gradients than another, where units of ReLU are
on in one and off in another: that happens in some steps and not in others, as it may in a layout.
"""
_NOTHING_ELSE = 0.5
"""Of its size: what two roundings of the first step's gradient differ by where it is nothing but
rounding, as that of a bias before batch normalisation, which takes every constant away.
"""
FEW_STEPS = 6
"""Over more, roundings grow apart in a small model at a large rate."""
_LENGTH = "length"
"""The kind of what a gradient as a whole is too large or too small by."""
_EXACT = {
    *("order", "steps", "logged", "evaluated", "rate", "skip", "counted", "seen", "scale"),
}
"""Kinds of numbers that rounding does not move."""
_MOST = {False: 1e-2, True: 0.5}
"""What rounding may make of a gradient, in fp32 and in lower precision, for it to be compared."""


class Tolerances:
    """How far each quantity may be off."""

    def __init__(
        self, config: RunConfig, reference: Reference, others: Sequence[Reference]
    ) -> None:
        """Measure what rounding does.

        Args:
            config: The layout's.
            reference: What ranks are compared with.
            others: The same from weights that are rounded otherwise.
        """
        self.base = tolerance_of(config)
        self._is_low = self.base > 1e-4
        self._times = TIMES[self._is_low]
        self._lags_at = len(reference.steps) if reference.buffers and not self._is_low else None
        self._sizes = {name: start.numel() for name, start in reference.start.items()}
        self._has_same_operations = _has_same_operations(config, reference)
        self._noise: dict[tuple[int, str, str], float] = {}
        usual: dict[tuple[int, str], list[float]] = {}
        for other in others:
            noise = dict(_relative_noise(reference, other))
            for key, relative in noise.items():
                self._noise[key] = max(relative, self._noise.get(key, 0.0))
            for step, kind in {(step, kind) for step, kind, _ in noise}:
                same = [n for key, n in noise.items() if key[:2] == (step, kind)]
                usual.setdefault((step, kind), []).append(statistics.median(same))
        self._usual = {key: max(of_each) for key, of_each in usual.items()}
        most = _MOST[self._is_low]
        chaotic = [
            step
            for (step, kind), of_each in usual.items()
            if kind in ("loss", "gradient", "parameter")
            and statistics.median(of_each) * self._times > most
        ]
        # Where rounding decides whether fp16 overflows, all that comes later is another run's.
        skips = [[step.skipped for step in run.steps] for run in (reference, *others)]
        of_runs = enumerate(zip(*skips, strict=True), start=1)
        chaotic += [number for number, skipped in of_runs if len({*skipped}) > 1]
        if self._has_same_operations:
            chaotic = []
        self.last_step = min(chaotic, default=len(reference.steps) + 1) - 1
        """The last step whose numbers say anything; after it rounding has taken over."""
        self._noise = {key: n for key, n in self._noise.items() if key[0] <= self.last_step}
        self._usual = {key: n for key, n in self._usual.items() if key[0] <= self.last_step}
        _never_less(self._noise)
        _never_less(self._usual)
        # Over many steps roundings in fp32 grow apart, which says nothing of the first ones.
        has_jumps = self._is_low or len(reference.steps) <= FEW_STEPS
        of_gradients = [usual[key] for key in self._usual if key[1] == "gradient"]
        if has_jumps and any(max(of) > _JUMP * min(of) for of in of_gradients):
            self._expect_in_every_step()

    def _expect_in_every_step(self) -> None:
        """Expect in each step what rounding makes of a gradient in any, also in its averages."""
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
            usual = max(noise for key, noise in self._usual.items() if key[1] == kind)
            self._usual |= {key: usual for key in self._usual if key[1] == kind}

    def of(self, difference: Difference) -> float:
        """Return what the quantity of a difference may be off by."""
        kind = difference.kind
        if kind in _EXACT:
            return 1e-9
        if self._has_same_operations and (difference.step, kind) == (1, "gradient"):
            return _OF_SAME_OPERATIONS
        base = norm_tolerance(self.base) if kind == "norm" else self.base
        if self._is_low and kind in ("loss", "evaluation"):
            base /= _OF_LOSSES
        if kind == "evaluation" and difference.step == self._lags_at:
            base *= _OF_STATISTICS
        name = difference.name
        if kind == "checkpoint":  # what is read back is what was saved
            section, _, name = name.partition(".")
            kind = "state" if section == "optimizer" else "parameter"
            if (difference.step, "buffer", name) in self._noise:
                kind = "buffer"
        rounding = self._times * self._rounding(difference.step, kind, name)
        if self._has_same_operations:
            rounding = min(rounding, _MOST_OF_SAME_OPERATIONS)
        return max(base, rounding)

    def allows(self, difference: Difference) -> bool:
        """Say whether rounding explains a difference."""
        if not difference.relative <= self.of(difference):
            return False
        if not self._is_low or difference.kind != "gradient" or difference.ratio is None:
            return True
        step, name = difference.step, difference.name
        rounding = self._times * self._rounding(step, _LENGTH, name)
        base = FACTOR_BASE
        if difference.count < _FEW:
            # A unit of ReLU that is on in one of two roundings makes a difference in one direction,
            # which in a rank's part weighs more than in the whole.
            share = difference.count / self._sizes.get(name, difference.count)
            rounding = max(rounding, self._rounding(step, "gradient", name) / math.sqrt(share))
            base = _FACTOR_OF_FEW if step > 1 else base
        return abs(difference.ratio - 1) <= max(base, rounding)

    def _rounding(self, step: int, kind: str, name: str) -> float:
        """Return what rounding made: of the quantity itself, or as usual of its kind."""
        return max(self._noise.get((step, kind, name), 0.0), self._usual.get((step, kind), 0.0))


def _never_less(noise: dict[Any, float]) -> None:
    """Expect in a step what rounding has made of the same quantity in one before it, in place."""
    most: dict[Any, float] = {}
    for key in sorted(noise):
        _, *quantity = key
        so_far = max(noise[key], most.get(tuple(quantity), 0.0))
        noise[key] = most[tuple(quantity)] = so_far


def floors(reference: Reference, number: int) -> float:
    """Return the floor of a step's gradients."""
    return GRADIENT_FLOOR * root_mean_square(reference.steps[number].gradients.values())


def state_floors(states: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the floor of each kind of optimizer state, by its name."""
    kinds: dict[str, list[Tensor]] = {}
    for key, state in states.items():
        if state.numel() > 1:
            kinds.setdefault(key.rpartition(".")[2], []).append(state)
    return {kind: GRADIENT_FLOOR * root_mean_square(of) for kind, of in kinds.items()}


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Return the root mean square of all elements."""
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += float(tensor.double().square().sum())
        count += tensor.numel()
    return math.sqrt(squares / max(1, count))


def _has_same_operations(config: RunConfig, reference: Reference) -> bool:
    """Say whether a bf16 layout rounds as the reference does, until ranks sum their gradients.

    It divides samples only, into a number of parts that is a power of two, and sums in fp32. What
    it trains is fp32; the frozen weights beside an adapter may be bf16.
    """
    train, layout = config.train, Layout.of(config, world_size=num_ranks(config))
    is_trained_in_fp32 = train.param_dtype == "fp32" or config.adapter is not None
    is_mixed = train.precision == "bf16" and config.strategy.reduce_dtype == "fp32"
    is_mixed = is_mixed and is_trained_in_fp32
    divides_samples_alone = max(layout.degrees.values()) == 1
    is_like_plain = not train.compile and not train.loss_chunk and config.launch.backend == "mock"
    is_fp64 = any(p.dtype is torch.float64 for p in reference.start.values())
    is_power = layout.data_ranks & (layout.data_ranks - 1) == 0
    is_like_plain = is_like_plain and not is_fp64 and not reference.reads_again
    return is_mixed and divides_samples_alone and is_like_plain and is_power


def _relative_noise(
    one: Reference, other: Reference
) -> Iterable[tuple[tuple[int, str, str], float]]:
    """Yield by how much two references differ, by step, kind and name."""
    for noise in _noise(one, other):
        yield (noise.step, noise.kind, noise.name), noise.relative
        if noise.kind == "gradient" and noise.ratio is not None:
            yield (noise.step, _LENGTH, noise.name), abs(noise.ratio - 1)


def _nothing_but_rounding(one: Reference, other: Reference) -> set[str]:
    """Return parameters whose gradient is zero but for rounding.

    By how much two references differ in it says little of a third: rounding has its whole size.
    """
    mine, theirs = one.steps[0], other.steps[0]
    if mine.skipped or theirs.skipped:
        return set()
    return {
        name
        for name, gradient in mine.gradients.items()
        if name in theirs.gradients
        and (gradient - theirs.gradients[name]).norm() > _NOTHING_ELSE * gradient.norm()
    }


def _noise(one: Reference, other: Reference) -> Iterable[Difference]:
    """Yield what two references differ by."""
    zero = _nothing_but_rounding(one, other)
    for number, (mine, theirs) in enumerate(zip(other.steps, one.steps, strict=True)):
        if mine.skipped != theirs.skipped:
            continue
        yield of_number(number, "loss", mine.loss, theirs.loss)
        if mine.skipped:
            continue
        yield of_number(number, "norm", mine.norm, theirs.norm)
        floor = floors(one, number)
        for name, gradient in mine.gradients.items():
            if name not in theirs.gradients:  # as an expert to which rounding sent no token
                continue
            expected = theirs.gradients[name]
            if name in zero:
                size = torch.maximum(gradient.abs(), expected.abs())
                gradient = expected + size.to(expected.dtype)
            yield of_tensor((number, "gradient", name), gradient, expected, floor=floor)
    saved, end = one.saved_step - 1, len(one.steps) - 1
    floors_of = state_floors(one.states)
    for name, value in other.parameters.items():
        where = (saved, "parameter", name)
        yield of_tensor(where, value, one.parameters[name], floor=PARAMETER_FLOOR)
    if end != saved:
        for name, value in other.end.items():
            where = (end, "parameter", name)
            yield of_tensor(where, value, one.end[name], floor=PARAMETER_FLOOR)
    for name, value in other.buffers.items():
        if value.is_floating_point():
            where = (saved, "buffer", name)
            yield of_tensor(where, value, one.buffers[name], floor=PARAMETER_FLOOR)
    for name, value in other.states.items():
        if name not in one.states:  # fp16 has skipped every step so far
            continue
        floor = floors_of.get(name.rpartition(".")[2], 0.0)
        yield of_tensor((saved, "state", name), value, one.states[name], floor=floor)
    if one.end_evaluation is not None and other.end_evaluation is not None:
        yield of_number(end, "evaluation", other.end_evaluation[0], one.end_evaluation[0])
    half = one.halfway - 1
    if one.evaluation is not None and other.evaluation is not None:
        yield of_number(half, "evaluation", other.evaluation[0], one.evaluation[0])
    if one.prediction is not None and other.prediction is not None:
        yield of_tensor((half, "prediction", ""), other.prediction, one.prediction, floor=0.0)
