"""What rounding explains, quantity by quantity and step by step.

A quantity passes within a base of the lowest precision in use, or within some times what rounding
alone makes of it: what two references differ by whose weights are rounded otherwise. That grows
with the steps as the run itself makes more of a rounded bit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.verification.differences import Difference, of_number, of_tensor
from axonlaunch.verification.reference import Reference
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
_DEVIATIONS = 3.0
"""Of errors of n elements that go in all directions ``1 / sqrt(n)`` of their size adds up in one.
By so many times that a gradient may be too long or too short: a rank's part of a bias may have six.
"""
_OF_SAME_OPERATIONS = 2.0**-11
"""In bf16: what a gradient of the first step may be off by where a layout runs the operations of
the reference on the same rows. All that is left is an fp32 sum over ranks, 1e-7; in bf16 it makes
1e-3.
"""
_MOST = {False: 1e-2, True: 0.5}
"""What rounding may make of a gradient, in fp32 and in lower precision, for it to be compared."""


class Tolerances:
    """How far each quantity may be off."""

    def __init__(self, config: RunConfig, reference: Reference, again: Reference) -> None:
        """Measure what rounding does.

        Args:
            config: The layout's.
            reference: What ranks are compared with.
            again: The same from weights that are rounded otherwise.
        """
        self.base = tolerance_of(config)
        self._is_low = self.base > 1e-4
        self._times = TIMES[self._is_low]
        self._has_same_operations = _has_same_operations(config, reference)
        self._noise: dict[tuple[int, str, str], Difference] = {}
        self._usual: dict[tuple[int, str], float] = {}
        for noise in _noise(reference, again):
            self._noise[noise.step, noise.kind, noise.name] = noise
        kinds = {(noise.step, noise.kind) for noise in self._noise.values()}
        for step, kind in kinds:
            same = [n.relative for n in self._noise.values() if (n.step, n.kind) == (step, kind)]
            self._usual[step, kind] = statistics.median(same)
        most = _MOST[self._is_low]
        chaotic = [
            step
            for (step, kind), usual in self._usual.items()
            if kind in ("loss", "gradient", "parameter") and usual * self._times > most
        ]
        self.last_step = min(chaotic, default=len(reference.steps) + 1) - 1
        """The last step whose numbers say anything; after it rounding has taken over."""

    def of(self, difference: Difference) -> float:
        """Return what the quantity of a difference may be off by."""
        kind = difference.kind
        if kind in ("rate", "skip"):
            return 1e-9
        if self._has_same_operations and (difference.step, kind) == (1, "gradient"):
            return _OF_SAME_OPERATIONS
        base = norm_tolerance(self.base) if kind == "norm" else self.base
        if self._is_low and kind in ("loss", "evaluation"):
            base /= _OF_LOSSES
        name = difference.name
        if kind == "checkpoint":  # what is read back is what was saved
            section, _, name = name.partition(".")
            kind = "state" if section == "optimizer" else "parameter"
            if (difference.step, "buffer", name) in self._noise:
                kind = "buffer"
        known = self._noise.get((difference.step, kind, name))
        own = known.relative if known is not None else 0.0
        usual = self._usual.get((difference.step, kind), 0.0)
        return max(base, self._times * max(own, usual))

    def allows(self, difference: Difference) -> bool:
        """Say whether rounding explains a difference."""
        if not difference.relative <= self.of(difference):
            return False
        if not self._is_low or difference.kind != "gradient" or difference.ratio is None:
            return True
        known = self._noise.get((difference.step, "gradient", difference.name))
        noise = 0.0 if known is None or known.ratio is None else abs(known.ratio - 1)
        is_rough = difference.step > 1 and difference.count < _FEW
        base = _FACTOR_OF_FEW if is_rough else FACTOR_BASE
        by_chance = _DEVIATIONS * difference.relative / math.sqrt(difference.count)
        return abs(difference.ratio - 1) <= max(base, self._times * noise, by_chance)


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

    It divides samples alone, into parts whose number is a power of two, and sums in fp32.
    """
    train, layout = config.train, Layout.of(config, world_size=num_ranks(config))
    is_mixed = train.precision == "bf16" and {train.param_dtype, config.strategy.reduce_dtype} == {
        "fp32"
    }
    divides_samples_alone = layout.pipeline == layout.context == layout.tensor == 1
    is_like_plain = not train.compile and not train.loss_chunk and config.launch.backend == "mock"
    is_fp64 = any(p.dtype is torch.float64 for p in reference.start.values())
    is_power = layout.data_ranks & (layout.data_ranks - 1) == 0
    return is_mixed and divides_samples_alone and is_like_plain and is_power and not is_fp64


def _noise(one: Reference, other: Reference) -> Iterable[Difference]:
    """Yield what two references differ by."""
    for number, (mine, theirs) in enumerate(zip(other.steps, one.steps, strict=True)):
        if mine.skipped or theirs.skipped:
            continue
        yield of_number(number, "loss", mine.loss, theirs.loss)
        yield of_number(number, "norm", mine.norm, theirs.norm)
        floor = floors(one, number)
        for name, gradient in mine.gradients.items():
            yield of_tensor(
                (number, "gradient", name), gradient, theirs.gradients[name], floor=floor
            )
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
        floor = floors_of.get(name.rpartition(".")[2], 0.0)
        yield of_tensor((saved, "state", name), value, one.states[name], floor=floor)
    half = one.halfway - 1
    if one.evaluation is not None and other.evaluation is not None:
        yield of_number(half, "evaluation", other.evaluation[0], one.evaluation[0])
    if one.prediction is not None and other.prediction is not None:
        yield of_tensor((half, "prediction", ""), other.prediction, one.prediction, floor=0.0)
