"""Compares all elements of a step's tensors between two runs that both wrote them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.diagnostics.module_trace.files import (
    TracedKind,
    UnreadableModuleTraceError,
    element_name,
    elements_path,
)


@dataclass(frozen=True)
class DifferentElements:
    """Differences between the elements of a tensor in two runs.

    Attributes:
        relative: Root mean square of the differences, divided by that of the larger tensor.
        index: Index of the first element outside the tolerance; None if all are within.
        values: Values of that element in both runs.
        count: Number of elements outside the tolerance.
        total: Number of elements.
    """

    relative: float
    index: tuple[int, ...] | None
    values: tuple[float, float]
    count: int
    total: int


class ElementsOfStep:
    """The elements of a step in two runs. A tensor is read when it is compared."""

    def __init__(self, first: Path, second: Path) -> None:
        """Open both files.

        Args:
            first: File with elements of the first run's step.
            second: File with elements of the second run's step.

        Raises:
            UnreadableModuleTraceError: A file is corrupt.
        """
        from safetensors import SafetensorError, safe_open

        self._files: list[Any] = []
        for path in (first, second):
            try:
                self._files.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                message = f"{path}: can't be read as safetensors ({error})"
                raise UnreadableModuleTraceError(message) from None
        self._names = {*self._files[0].keys()} & {*self._files[1].keys()}

    def compare(
        self, kind: TracedKind, name: str, *, floor: float, passing: float
    ) -> DifferentElements | None:
        """Compare a tensor.

        Args:
            kind: Role of the tensor in its module.
            name: Name of the module or parameter.
            floor: Value added to the tensor's root mean square before dividing by it.
            passing: Largest allowed difference of an element, divided by the tensor's root mean
                square.

        Returns:
            The differences; None if a run did not write the tensor, or with another shape.
        """
        import torch

        key = element_name(kind, name)
        if key not in self._names:
            return None
        first, second = (file.get_tensor(key).double() for file in self._files)
        if first.shape != second.shape or not first.numel():
            return None
        same = (first == second) | (first.isnan() & second.isnan())
        difference = torch.where(same, 0.0, first - second).abs()
        size = max(float(tensor.square().mean().sqrt()) for tensor in (first, second)) + floor
        relative = float(difference.square().mean().sqrt()) / size if size else 0.0
        wrong = ~(difference <= passing * size)
        count = int(wrong.sum())
        if math.isnan(relative):
            relative = math.inf if count else 0.0
        if not count:
            return DifferentElements(relative, None, (0.0, 0.0), 0, first.numel())
        position = int(wrong.flatten().to(torch.uint8).argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), first.shape))
        values = float(first.flatten()[position]), float(second.flatten()[position])
        return DifferentElements(relative, index, values, count, first.numel())


def elements_of_steps(
    first_run: Mapping[int, Path], second_run: Mapping[int, Path]
) -> dict[int, ElementsOfStep]:
    """Return the elements of each step for which both runs wrote them.

    Args:
        first_run: Trace files of the first run, by step.
        second_run: Trace files of the second run, by step.

    Raises:
        UnreadableModuleTraceError: A file is corrupt.
    """
    both = {
        step: (elements_path(path), elements_path(second_run[step]))
        for step, path in first_run.items()
        if step in second_run
    }
    return {
        step: ElementsOfStep(*paths)
        for step, paths in both.items()
        if all(path.exists() for path in paths)
    }
