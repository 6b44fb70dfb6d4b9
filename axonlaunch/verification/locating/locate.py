"""Finds the first module whose results differ between a layout and one process.

Outputs of modules are compared in order of computation, each rank's output with the matching part
of the reference. Gradients of outputs and of parameters follow, from the loss backwards, and then
the updates of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.verification.locating import tensor_dump
from axonlaunch.verification.locating.recorded_steps import Pair, Quantity, RecordedSteps
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import (
    Difference,
    compare_tensors,
    root_mean_square,
    simple_ratio,
)
from axonlaunch.verification.references.tolerances import GRADIENT_FLOOR
from axonlaunch.verification.result import tolerance_of

_TOLERANCE_FACTOR = 10.0
"""Multiple of the base tolerance. It is far above rounding, because real errors are large."""
_UPDATE_TOLERANCE = 1e-2
"""Lowest tolerance of updates: a small change of a weight loses its last bits."""
_UPDATE_FACTOR = 3.0
"""Tolerance of updates relative to gradients: AdamW makes a full step of a tiny gradient."""


@dataclass(frozen=True)
class FirstDifference:
    """The first module whose results differ.

    Attributes:
        module: Name of the module; empty for the whole model.
        what: Description of the quantity, the difference and the ranks.
    """

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what}"


@dataclass(frozen=True)
class _Compared:
    """A pair of tensors and their difference."""

    pair: Pair
    difference: Difference


def locate_difference(
    config: RunConfig, plan: ComparisonPlan, folder: Path | None = None
) -> FirstDifference | None:
    """Record two steps of the reference and the layout, and return the first difference.

    Args:
        config: Checked configuration, small enough to run twice on the mock world.
        plan: Plan of the comparison that failed.
        folder: Folder to which the recorded tensors are written; None writes nothing.
    """
    import_plugins(config.plugins)
    recorded = RecordedSteps(config, fp64=plan.fp64)
    if folder is not None:
        tensor_dump.write_tensors(recorded, folder)
    return first_difference(recorded, config)


def first_difference(recorded: RecordedSteps, config: RunConfig) -> FirstDifference | None:
    """Return the first module whose output, gradient or update differs from one process.

    If the gradient of an output is wrong, the module that computes it is named: the module that
    takes the output as input, if the gradient of its output is correct.

    Args:
        recorded: Recorded steps of the reference and of the layout.
        config: Configuration of the run.
    """
    passing = _TOLERANCE_FACTOR * tolerance_of(config)
    correct: set[tuple[int, str]] = set()
    floors = _floors(recorded)
    for quantity in recorded.quantities():
        if not bool(quantity.plain.isfinite().all()):
            continue  # overflowed in fp16
        if quantity.missing:
            return _missing_micro_batches(quantity, recorded.layout)
        tolerance = passing
        if quantity.kind == "parameter":
            tolerance = max(_UPDATE_FACTOR * passing, _UPDATE_TOLERANCE)
        compared = [_compare(quantity, pair, floors) for pair in quantity.pairs]
        wrong = [
            candidate for candidate in compared if not candidate.difference.relative <= tolerance
        ]
        if wrong:
            module, subject = _at_fault(quantity, recorded, correct)
            return FirstDifference(
                module, _describe(subject, quantity, wrong, compared, recorded, tolerance)
            )
        if quantity.kind == "output gradient" and compared:
            correct.add((quantity.step, quantity.name))
    return None


def _floors(recorded: RecordedSteps) -> dict[tuple[int, str], float]:
    """Return lower bounds for the size of gradients and updates, by step and kind."""
    by_kind: dict[tuple[int, str], list[Tensor]] = {}
    for quantity in recorded.quantities():
        if quantity.kind in ("gradient", "parameter"):
            tensor = quantity.plain
            moved = tensor if quantity.previous is None else tensor - quantity.previous
            by_kind.setdefault((quantity.step, quantity.kind), []).append(moved)
    return {key: GRADIENT_FLOOR * root_mean_square(tensors) for key, tensors in by_kind.items()}


def _compare(quantity: Quantity, pair: Pair, floors: dict[tuple[int, str], float]) -> _Compared:
    actual, expected = pair.actual, pair.expected
    if quantity.previous is not None:  # compare updates, because the previous values are equal
        previous = quantity.previous[pair.index]
        actual, expected = actual.double() - previous, expected.double() - previous
    floor = floors.get((quantity.step, quantity.kind), 0.0)
    key = (quantity.step - 1, quantity.kind, quantity.name)
    return _Compared(pair, compare_tensors(key, actual, expected, floor=floor, rank=pair.rank))


def _at_fault(
    quantity: Quantity, recorded: RecordedSteps, correct: set[tuple[int, str]]
) -> tuple[str, str]:
    """Return the module to name and the quantity of it that is wrong."""
    name = quantity.name
    if quantity.kind == "output":
        return name, "its output"
    if quantity.kind == "output gradient":
        readers = recorded.readers(quantity.step, name)
        if readers and all((quantity.step, reader) in correct for reader in readers):
            return readers[0], f"the gradient of its input, {name}'s output,"
        return name, "the gradient of its output"
    kind = "gradient" if quantity.kind == "gradient" else "update"
    return name.rpartition(".")[0] or name, f"the {kind} of {name}"


def _missing_micro_batches(quantity: Quantity, layout: Layout) -> FirstDifference:
    count = min(quantity.missing.values())
    ranks = ", ".join(map(str, sorted(quantity.missing)))
    return FirstDifference(
        quantity.name,
        f"it computes {count} of {layout.micro_batches} micro-batches on rank {ranks}",
    )


def _describe(
    subject: str,
    quantity: Quantity,
    wrong: Sequence[_Compared],
    everything: Sequence[_Compared],
    recorded: RecordedSteps,
    passing: float,
) -> str:
    layout = recorded.layout
    worst = max(wrong, key=lambda item: item.difference.relative)
    times = simple_ratio(worst.difference)
    how = f"is off by {worst.difference.relative:.2g} of its size"
    if times is not None:
        how = f"is {times} what it should be"
        for axis, size in layout.axes.items():
            if size > 1 and _is_close_to(worst.difference.ratio, size):
                how += f", as if summed once too often over {axis}"
            elif size > 1 and _is_close_to(worst.difference.ratio, 1 / size):
                how += f", as if not summed, or averaged twice, over {axis}"
    elif quantity.previous is None:
        others = [item.pair for item in everything if item.pair.rank != worst.pair.rank]
        how += _misplaced_part(worst.pair, others, partial(_is_near, within=passing))
    step = "" if quantity.step == 1 else f" in step {quantity.step}"
    return f"{subject} {how}{step} {_ranks_text(wrong, everything, layout)}"


def _misplaced_part(
    worst: Pair, others: Sequence[Pair], is_near: Callable[[Tensor, Tensor], bool]
) -> str:
    """Describe a tensor that is another rank's, or that is wrong in only one half of a dim."""
    actual, expected = worst.actual, worst.expected
    for other in others:
        if other.expected.shape == actual.shape and is_near(actual, other.expected):
            return f": it is rank {other.rank}'s"
    for dim, size in enumerate(actual.shape):
        if size < 2 or size % 2:
            continue
        halves = [*zip(actual.chunk(2, dim), expected.chunk(2, dim), strict=True)]
        half_is_correct = [is_near(*half) for half in halves]
        if sum(half_is_correct) != 1:
            continue
        wrong = half_is_correct.index(False)
        which = f"the {('first', 'second')[wrong]} half of dim {dim}"
        for other in others:
            if other.expected.shape == actual.shape and is_near(
                halves[wrong][0], other.expected.chunk(2, dim)[wrong]
            ):
                return f": {which} is rank {other.rank}'s"
        return f", all of it in {which}"
    return ""


def _is_near(actual: Tensor, expected: Tensor, *, within: float) -> bool:
    size = float(torch.linalg.vector_norm(expected.double()))
    distance = float(torch.linalg.vector_norm(actual.double() - expected))
    return math.isfinite(distance) and distance <= within * size


def _is_close_to(ratio: float | None, value: float) -> bool:
    return ratio is not None and abs(ratio - value) < 1e-2 * value


def _ranks_text(wrong: Sequence[_Compared], everything: Sequence[_Compared], layout: Layout) -> str:
    """Name the ranks with a difference, and the mesh coordinates that only they have in common."""
    wrong_ranks = sorted({item.pair.rank for item in wrong})
    all_ranks = {item.pair.rank for item in everything}
    if set(wrong_ranks) == all_ranks:
        return "on every rank that computes it"
    coordinates = []
    for axis, size in layout.axes.items():
        of_wrong = {layout.coordinates(rank)[axis] for rank in wrong_ranks}
        of_all = {layout.coordinates(rank)[axis] for rank in all_ranks}
        if size > 1 and len(of_wrong) == 1 and of_wrong != of_all:
            coordinates.append(f"{axis} {of_wrong.pop()}")
    common = f" ({', '.join(coordinates)})" if coordinates else ""
    return f"on rank {', '.join(map(str, wrong_ranks))}{common}"
