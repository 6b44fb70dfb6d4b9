"""How far what a rank has is from what one process has, number by number and tensor by tensor.

A rank compares the part of a tensor that it holds, so nothing is gathered, and who differs is
known; it decides nothing, which is ``judge``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch.models.dtensor_regions import local_boxes, whole

ORDER = (
    *(
        "order",
        "steps",
        "logged",
        "evaluated",
        "rate",
        "loss",
        "counted",
        "seen",
        "gradient",
        "skip",
        "scale",
        "norm",
    ),
    *("evaluation", "prediction", "arithmetic"),
    *("parameter", "buffer", "state", "checkpoint"),
)
"""Kinds of quantities, in the order in which a step computes them."""
_NAMES = {
    "steps": "number of steps that training does",
    "logged": "number of steps that training reports",
    "evaluated": "number of evaluations that training does",
    "rate": "learning rate",
    "order": "number of samples that this rank reads where epochs end, and are another's,",
    "counted": "number of counted targets",
    "seen": "number of counted targets of all steps so far",
    "scale": "loss scale",
    "norm": "gradient norm",
    "state": "optimizer state",
    "evaluation": "evaluation loss",
    "checkpoint": "what one process reads from the checkpoint",
}
_BESIDE = 1e-3
"""Of the squared distance: what may be left beside a factor that explains the rest."""
_LEAST_PART = 0.5
"""Of its fair share of a tensor's size: what a rank's part must have for its ratio to mean much."""


@dataclass(frozen=True)
class Difference:
    """How far a quantity is from that of one process.

    Attributes:
        step: The step, from 1.
        kind: One of ``ORDER``.
        name: The parameter's; empty for a number of the whole step.
        relative: The distance beside the quantity's size; infinite where there is none.
        seen: A number that the layout gave.
        expected: That number in one process.
        ratio: Of a tensor, by how much it is longer in the direction of what is expected.
        is_factor: Whether that is all that differs.
        count: Elements that were compared.
        rank: Whose.
    """

    step: int
    kind: str
    name: str
    relative: float
    seen: float | None = None
    expected: float | None = None
    ratio: float | None = None
    is_factor: bool = False
    count: int = 1
    rank: int = 0

    def __str__(self) -> str:
        where = f"step {self.step}: "
        kind = _NAMES.get(self.kind, self.kind)
        if self.kind == "arithmetic":
            return f"{where}{self.name}, which one process's are not"
        if self.kind == "skip":
            done = {0.0: "makes", 1.0: "skips"}
            return (
                f"{where}the layout {done[self.seen or 0.0]} the update that one process "
                f"{done[self.expected or 0.0]}"
            )
        if self.seen is not None and self.expected is not None:
            return f"{where}{kind} is {self.seen:.7g}, not {self.expected:.7g}"
        of = f"{kind} of {self.name}" if self.name else kind
        if math.isinf(self.relative):
            return f"{where}no rank has the {of}"
        times = (
            "" if (simple := simple_ratio(self)) is None else f": it is {simple} what it should be"
        )
        return f"{where}{of} is off by {self.relative:.2g} of its size{times}"


def simple_ratio(difference: Difference) -> str | None:
    """Return ``"2.00 times"`` where all that differs is a factor; None where it is not."""
    ratio = difference.ratio
    if ratio is None or not difference.is_factor:
        return None
    return f"{ratio:.2f} times" if abs(ratio - 1) > 0.1 else f"{ratio:.3f} times"


def of_number(step: int, kind: str, seen: float, expected: float, *, rank: int = 0) -> Difference:
    """Compare two numbers; ``step`` counts from 0."""
    relative = abs(seen - expected) / max(abs(expected), 1e-12)
    relative = relative if math.isfinite(relative) else math.inf
    return Difference(step + 1, kind, "", relative, seen, expected, rank=rank)


def of_tensor(
    where: tuple[int, str, str], seen: Tensor, expected: Tensor, *, floor: float, rank: int = 0
) -> Difference:
    """Compare what a rank holds of a tensor with that part of what one process has.

    Args:
        where: Step from 0, kind and name.
        seen: Plain and whole, or a DTensor.
        expected: Whole.
        floor: What an element is at least taken to be large.
        rank: Whose it is.
    """
    step, kind, name = where
    if seen.shape != expected.shape:
        return Difference(step + 1, kind, name, math.inf, rank=rank)
    square, product, own, count = 0.0, 0.0, 0.0, 0
    for mine, theirs in _pairs(seen, expected):
        mine, theirs = _doubles(mine.detach().cpu()), _doubles(theirs)
        square += float((mine - theirs).square().sum())
        product += float((mine * theirs).sum())
        own += float(theirs.square().sum())
        count += mine.numel()
    if not count:
        return Difference(step + 1, kind, name, 0.0, rank=rank)
    # A part that is nearly nothing is judged beside its share of the whole.
    share = float(_doubles(expected).square().sum()) * count / expected.numel()
    size = math.sqrt(max(own, share)) + floor * math.sqrt(count)
    relative = math.sqrt(square) / max(size, 1e-300) if math.isfinite(square) else math.inf
    has_size = own > (_LEAST_PART * size) ** 2
    ratio = product / own if has_size and math.isfinite(product) else None
    beside = 0.0 if ratio is None else square - (ratio - 1) ** 2 * own
    is_factor = ratio is not None and abs(beside) < _BESIDE * square
    return Difference(
        step + 1,
        kind,
        name,
        relative,
        ratio=ratio,
        is_factor=is_factor,
        count=count,
        rank=rank,
    )


def _doubles(tensor: Tensor) -> Tensor:
    """Return fp64 numbers, of complex ones two each."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _pairs(seen: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each box that this rank holds, and that box of the whole."""
    if not isinstance(seen, DTensor):
        yield seen, expected
        return
    try:
        boxes = local_boxes(seen)
    except NotImplementedError:  # no boxes of the whole; all ranks of its mesh are here
        yield whole(seen.detach()), expected
        return
    local = seen.to_local()
    for box in boxes if local.numel() else ():
        part = expected
        for dim, (start, length) in enumerate(box.region):
            part = part.narrow(dim, start, length)
        yield box.of(local), part


def as_number(tensor: Tensor | None) -> float | None:
    """Return the number of a 0-dim tensor."""
    return None if tensor is None else float(torch.as_tensor(tensor))
