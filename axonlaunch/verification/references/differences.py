"""Measures the difference between a layout and one process, for numbers and tensors.

Each rank compares the part of a tensor that it holds, so nothing is gathered and the differing
ranks are known. ``verdict`` decides whether a difference passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch.models.tensors.dtensor_regions import full_tensor, local_boxes

ORDER = (
    *(
        "order",
        "steps",
        "logged",
        "evaluated",
        "rate",
        "choice",
        "loss",
        "counted",
        "seen",
        "again",
        "gradient",
        "sum",
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
    "order": "number of samples that this rank wrongly reads at the ends of epochs",
    "counted": "number of counted targets",
    "seen": "number of counted targets of all steps so far",
    "scale": "loss scale",
    "norm": "gradient norm",
    "state": "optimizer state",
    "evaluation": "evaluation loss",
    "checkpoint": "value that one process reads from the checkpoint",
}
_UNEXPLAINED = 1e-3
"""Fraction of the squared distance that a constant factor may leave unexplained."""
_LEAST_PART = 0.5
"""Minimum norm of a rank's shard, relative to its share of the tensor, to report its ratio."""


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between a layout and one process.

    Attributes:
        step: Number of the step, from 1.
        kind: Kind of quantity, one of ``ORDER``.
        name: Name of the parameter or tensor; empty for a number of the whole step.
        relative: Distance relative to the size of the quantity; infinite if it is missing.
        actual: The layout's number; None for tensors.
        expected: The number in one process; None for tensors.
        ratio: Projection of a tensor on the expected tensor, relative to the expected length.
        is_factor: Whether the tensors differ only by the factor ``ratio``.
        count: Number of elements that were compared.
        rank: Global rank that compared.
    """

    step: int
    kind: str
    name: str
    relative: float
    actual: float | None = None
    expected: float | None = None
    ratio: float | None = None
    is_factor: bool = False
    count: int = 1
    rank: int = 0

    def __str__(self) -> str:
        prefix = f"step {self.step}: "
        kind = _NAMES.get(self.kind, self.kind)
        if self.kind == "arithmetic":
            return f"{prefix}{self.name}, unlike in one process"
        if self.kind == "skip":
            done = {0.0: "makes", 1.0: "skips"}
            return (
                f"{prefix}the layout {done[self.actual or 0.0]} the update that one process "
                f"{done[self.expected or 0.0]}"
            )
        if self.kind == "choice":
            return (
                f"{prefix}{self.count} tokens in {self.name} go to other experts; scores differ by "
                f"{self.relative:.2g} of the largest"
            )
        if self.kind == "again":
            return (
                f"{prefix}blocks that are computed again in backward choose the experts of "
                f"{self.count} tokens again, which rounding can change"
            )
        if self.actual is not None and self.expected is not None:
            return f"{prefix}{kind} is {self.actual:.7g}, not {self.expected:.7g}"
        if self.kind == "sum":
            return (
                f"{prefix}the gradient of {self.name} is not summed over micro-batches and ranks "
                f"in fp32: the sum is off by {self.relative:.2g} of its size"
            )
        quantity = f"{kind} of {self.name}" if self.name else kind
        if math.isinf(self.relative):
            return f"{prefix}no rank has the {quantity}"
        times = (
            "" if (simple := simple_ratio(self)) is None else f": it is {simple} what it should be"
        )
        return f"{prefix}{quantity} is off by {self.relative:.2g} of its size{times}"


def simple_ratio(difference: Difference) -> str | None:
    """Return ``"2.00 times"`` if the tensors differ only by a factor, otherwise None."""
    ratio = difference.ratio
    if ratio is None or not difference.is_factor:
        return None
    return f"{ratio:.2f} times" if abs(ratio - 1) > 0.1 else f"{ratio:.3f} times"


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Return the root mean square of all elements."""
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += float(tensor.double().square().sum())
        count += tensor.numel()
    return math.sqrt(squares / max(1, count))


def compare_numbers(
    step: int, kind: str, actual: float, expected: float, *, rank: int = 0
) -> Difference:
    """Compare two numbers; ``step`` counts from 0."""
    relative = abs(actual - expected) / max(abs(expected), 1e-12)
    relative = relative if math.isfinite(relative) else math.inf
    return Difference(step + 1, kind, "", relative, actual, expected, rank=rank)


def compare_tensors(
    quantity: tuple[int, str, str], actual: Tensor, expected: Tensor, *, floor: float, rank: int = 0
) -> Difference:
    """Compare this rank's part of a tensor with the same part of the reference.

    Args:
        quantity: Step from 0, kind and name.
        actual: DTensor, or a full plain tensor.
        expected: Full tensor of one process.
        floor: Lower bound for the size of an element, which limits the relative difference.
        rank: Global rank that holds ``actual``.
    """
    step, kind, name = quantity
    if actual.shape != expected.shape:
        return Difference(step + 1, kind, name, math.inf, rank=rank)
    square, product, expected_square, count = 0.0, 0.0, 0.0, 0
    for actual_part, expected_part in _pairs(actual, expected):
        actual_part, expected_part = _doubles(actual_part.detach().cpu()), _doubles(expected_part)
        square += float((actual_part - expected_part).square().sum())
        product += float((actual_part * expected_part).sum())
        expected_square += float(expected_part.square().sum())
        count += actual_part.numel()
    if not count:
        return Difference(step + 1, kind, name, 0.0, rank=rank)
    # The difference of a part with almost no norm is relative to its share of the full norm.
    share = float(_doubles(expected).square().sum()) * count / expected.numel()
    size = math.sqrt(max(expected_square, share)) + floor * math.sqrt(count)
    relative = math.sqrt(square) / max(size, 1e-300) if math.isfinite(square) else math.inf
    has_size = expected_square > (_LEAST_PART * size) ** 2
    ratio = product / expected_square if has_size and math.isfinite(product) else None
    unexplained = 0.0 if ratio is None else square - (ratio - 1) ** 2 * expected_square
    is_factor = ratio is not None and abs(unexplained) < _UNEXPLAINED * square
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
    """Convert to fp64; a complex number becomes two numbers."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _pairs(actual: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each box that this rank holds, with the same box of the full tensor."""
    if not isinstance(actual, DTensor):
        yield actual, expected
        return
    try:
        boxes = local_boxes(actual)
    except NotImplementedError:  # no rectangular parts; all ranks of its mesh are here
        yield full_tensor(actual.detach()), expected
        return
    local = actual.to_local()
    for box in boxes if local.numel() else ():
        part = expected
        for dim, (start, length) in enumerate(box.region):
            part = part.narrow(dim, start, length)
        yield box.view(local), part


def as_number(tensor: Tensor | None) -> float | None:
    """Return the number of a 0-dim tensor."""
    return None if tensor is None else float(torch.as_tensor(tensor))
