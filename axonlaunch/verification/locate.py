"""Where a layout begins to compute something else than one process: the first module, by its name.

Outputs of modules are compared in order of computation, each rank's with its part of what the plain
model gives; then gradients of outputs and of parameters, from the loss backwards; then updates.
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
from axonlaunch.config.layout import Layout
from axonlaunch.config.plugins import import_plugins
from axonlaunch.verification import tensor_dump
from axonlaunch.verification.comparison_plan import ComparisonPlan
from axonlaunch.verification.differences import Difference, of_tensor, simple_ratio
from axonlaunch.verification.recorded_steps import BothSides, Pair, Quantity
from axonlaunch.verification.result import tolerance_of
from axonlaunch.verification.tolerances import GRADIENT_FLOOR, root_mean_square

_TIMES = 10.0
"""Of the base tolerance: far more than rounding, for what differs here differs in earnest."""
_OF_UPDATES = 1e-2
"""What an update may be off by in any case: of a small part of a weight the last bits are lost."""
_TIMES_OF_UPDATES = 3.0
"""By how much more than a gradient: AdamW makes a whole step of one that is nearly nothing."""


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        module: Its name; of the whole model it is empty.
        what: What differs, where, and by which factor if it is one.
    """

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what}"


@dataclass(frozen=True)
class _Compared:
    """A pair of tensors and how far they are apart."""

    pair: Pair
    difference: Difference


def locate_difference(
    config: RunConfig, plan: ComparisonPlan, folder: Path | None = None
) -> FirstDifference | None:
    """Run both sides again, module by module; return the first difference.

    Args:
        config: Checked, small enough to be run on the mock world twice.
        plan: What was compared.
        folder: Where both sides are kept; None: nowhere.
    """
    import_plugins(config.plugins)
    sides = BothSides(config, fp64=plan.fp64)
    if folder is not None:
        tensor_dump.write_sides(sides, folder)
    return first_difference(sides, config)


def first_difference(sides: BothSides, config: RunConfig) -> FirstDifference | None:
    """Return the first module whose output, gradient or update is not one process's.

    Of a gradient of an output that is wrong the module is named that gives it back: the one that
    reads the output, if its own output's gradient is right.

    Args:
        sides: What both gave.
        config: The run's.
    """
    passing = _TIMES * tolerance_of(config)
    right: set[tuple[int, str]] = set()
    floors = _floors(sides)
    for quantity in sides.quantities():
        if not bool(quantity.plain.isfinite().all()):
            continue  # fp16 overflowed
        if quantity.missing:
            return _fewer(quantity, sides.layout)
        least = passing
        if quantity.kind == "parameter":
            least = max(_TIMES_OF_UPDATES * passing, _OF_UPDATES)
        compared = [_compare(quantity, pair, floors) for pair in quantity.pairs]
        wrong = [candidate for candidate in compared if not candidate.difference.relative <= least]
        if wrong:
            module, of = _at_fault(quantity, sides, right)
            return FirstDifference(module, _what(of, quantity, wrong, compared, sides, least))
        if quantity.kind == "output gradient" and compared:
            right.add((quantity.step, quantity.name))
    return None


def _floors(sides: BothSides) -> dict[tuple[int, str], float]:
    """Return by step and kind what an element of a gradient or update is at least taken for."""
    of_kind: dict[tuple[int, str], list[Tensor]] = {}
    for quantity in sides.quantities():
        if quantity.kind in ("gradient", "parameter"):
            tensor = quantity.plain
            moved = tensor if quantity.before is None else tensor - quantity.before
            of_kind.setdefault((quantity.step, quantity.kind), []).append(moved)
    return {key: GRADIENT_FLOOR * root_mean_square(tensors) for key, tensors in of_kind.items()}


def _compare(quantity: Quantity, pair: Pair, floors: dict[tuple[int, str], float]) -> _Compared:
    seen, expected = pair.seen, pair.expected
    if quantity.before is not None:  # how they move, for what they were is the same
        before = quantity.before[pair.index]
        seen, expected = seen.double() - before, expected.double() - before
    floor = floors.get((quantity.step, quantity.kind), 0.0)
    where = (quantity.step - 1, quantity.kind, quantity.name)
    return _Compared(pair, of_tensor(where, seen, expected, floor=floor, rank=pair.rank))


def _at_fault(quantity: Quantity, sides: BothSides, right: set[tuple[int, str]]) -> tuple[str, str]:
    """Return the module to name, and what of it is wrong."""
    name = quantity.name
    if quantity.kind == "output":
        return name, "its output"
    if quantity.kind == "output gradient":
        readers = sides.readers(quantity.step, name)
        if readers and all((quantity.step, reader) in right for reader in readers):
            return readers[0], f"the gradient of its input, {name}'s output,"
        return name, "the gradient of its output"
    of = "gradient" if quantity.kind == "gradient" else "update"
    return name.rpartition(".")[0] or name, f"the {of} of {name}"


def _fewer(quantity: Quantity, layout: Layout) -> FirstDifference:
    count = min(quantity.missing.values())
    ranks = ", ".join(map(str, sorted(quantity.missing)))
    return FirstDifference(
        quantity.name,
        f"it computes {count} of {layout.micro_batches} micro-batches on rank {ranks}",
    )


def _what(
    of: str,
    quantity: Quantity,
    wrong: Sequence[_Compared],
    everything: Sequence[_Compared],
    sides: BothSides,
    passing: float,
) -> str:
    layout = sides.layout
    worst = max(wrong, key=lambda item: item.difference.relative)
    times = simple_ratio(worst.difference)
    how = f"is off by {worst.difference.relative:.2g} of its size"
    if times is not None:
        how = f"is {times} what it should be"
        for axis, size in layout.axes.items():
            if size > 1 and _near(worst.difference.ratio, size):
                how += f", as if summed once too often over {axis}"
            elif size > 1 and _near(worst.difference.ratio, 1 / size):
                how += f", as if not summed, or averaged twice, over {axis}"
    elif quantity.before is None:
        others = [item.pair for item in everything if item.pair.rank != worst.pair.rank]
        how += _mistaken(worst.pair, others, partial(_is_near, within=passing))
    step = "" if quantity.step == 1 else f" in step {quantity.step}"
    return f"{of} {how}{step} {_where(wrong, everything, layout)}"


def _mistaken(
    worst: Pair, others: Sequence[Pair], is_near: Callable[[Tensor, Tensor], bool]
) -> str:
    """Say that one half of a dim alone is wrong, and whose part it is, where that is so."""
    seen, expected = worst.seen, worst.expected
    for other in others:
        if other.expected.shape == seen.shape and is_near(seen, other.expected):
            return f": it is rank {other.rank}'s"
    for dim, size in enumerate(seen.shape):
        if size < 2 or size % 2:
            continue
        halves = [*zip(seen.chunk(2, dim), expected.chunk(2, dim), strict=True)]
        rights = [is_near(*half) for half in halves]
        if sum(rights) != 1:
            continue
        place = rights.index(False)
        which = f"the {('first', 'second')[place]} half of dim {dim}"
        for other in others:
            if other.expected.shape == seen.shape and is_near(
                halves[place][0], other.expected.chunk(2, dim)[place]
            ):
                return f": {which} is rank {other.rank}'s"
        return f", all of it in {which}"
    return ""


def _is_near(seen: Tensor, expected: Tensor, *, within: float) -> bool:
    size = float(torch.linalg.vector_norm(expected.double()))
    apart = float(torch.linalg.vector_norm(seen.double() - expected))
    return math.isfinite(apart) and apart <= within * size


def _near(ratio: float | None, value: float) -> bool:
    return ratio is not None and abs(ratio - value) < 1e-2 * value


def _where(wrong: Sequence[_Compared], everything: Sequence[_Compared], layout: Layout) -> str:
    """Say on which ranks, and what they have in common that others have not."""
    here = sorted({item.pair.rank for item in wrong})
    everyone = {item.pair.rank for item in everything}
    if set(here) == everyone:
        return "on every rank that computes it"
    places = []
    for axis, size in layout.axes.items():
        seen = {layout.coordinates(rank)[axis] for rank in here}
        others = {layout.coordinates(rank)[axis] for rank in everyone}
        if size > 1 and len(seen) == 1 and seen != others:
            places.append(f"{axis} {seen.pop()}")
    common = f" ({', '.join(places)})" if places else ""
    return f"on rank {', '.join(map(str, here))}{common}"
