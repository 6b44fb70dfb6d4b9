"""All elements of a step's tensors in two runs side by side, where both wrote them."""

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
    """How the elements of a tensor differ.

    Attributes:
        relative: The root mean square of their differences, in the larger tensor's.
        index: Of the first element that is off by more than passes; None: none is.
        values: Of that element, in both runs.
        count: Elements that are off by more than passes.
        total: Elements.
    """

    relative: float
    index: tuple[int, ...] | None
    values: tuple[float, float]
    count: int
    total: int


class ElementsOfStep:
    """The elements of a step in two runs; a tensor is read when it is compared."""

    def __init__(self, ours: Path, theirs: Path) -> None:
        """Open both.

        Args:
            ours: Elements of the first run's step.
            theirs: Of the second's.

        Raises:
            UnreadableModuleTraceError: One is corrupt.
        """
        from safetensors import SafetensorError, safe_open

        self._files: list[Any] = []
        for path in (ours, theirs):
            try:
                self._files.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                message = f"{path}: holds no elements ({error})"
                raise UnreadableModuleTraceError(message) from None
        self._names = {*self._files[0].keys()} & {*self._files[1].keys()}

    def compare(
        self, kind: TracedKind, name: str, *, floor: float, passing: float
    ) -> DifferentElements | None:
        """Compare a tensor; None: one has no elements of it, or others.

        Args:
            kind: What it is.
            name: Whose.
            floor: Size that it is at least judged beside.
            passing: What an element may be off by, in the tensor's root mean square.
        """
        import torch

        key = element_name(kind, name)
        if key not in self._names:
            return None
        ours, theirs = (file.get_tensor(key).double() for file in self._files)
        if ours.shape != theirs.shape or not ours.numel():
            return None
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(same, 0.0, ours - theirs).abs()
        size = max(float(tensor.square().mean().sqrt()) for tensor in (ours, theirs)) + floor
        relative = float(apart.square().mean().sqrt()) / size if size else 0.0
        wrong = ~(apart <= passing * size)
        count = int(wrong.sum())
        if math.isnan(relative):
            relative = math.inf if count else 0.0
        if not count:
            return DifferentElements(relative, None, (0.0, 0.0), 0, ours.numel())
        place = int(wrong.flatten().to(torch.uint8).argmax())
        index = tuple(int(at) for at in torch.unravel_index(torch.tensor(place), ours.shape))
        values = float(ours.flatten()[place]), float(theirs.flatten()[place])
        return DifferentElements(relative, index, values, count, ours.numel())


def elements_of_steps(
    ours: Mapping[int, Path], theirs: Mapping[int, Path]
) -> dict[int, ElementsOfStep]:
    """Return the elements of the steps of which both runs wrote them, by step.

    Args:
        ours: The files of the first run's steps.
        theirs: Of the second's.

    Raises:
        UnreadableModuleTraceError: A file is corrupt.
    """
    both = {
        step: (elements_path(path), elements_path(theirs[step]))
        for step, path in ours.items()
        if step in theirs
    }
    return {
        step: ElementsOfStep(*paths)
        for step, paths in both.items()
        if all(path.exists() for path in paths)
    }
