"""Whole tensors from the parts that the ranks of a mock world hold, without a collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axonlaunch.models.tensors.dtensor_regions import held_boxes


class Held(NamedTuple):
    """What a rank holds of a tensor, and where that lies in the whole."""

    shape: torch.Size
    boxes: list[tuple[tuple[Any, ...], Tensor]]


def held(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Held]:
    """Copy what this rank holds of each tensor; all ranks of its mesh call this."""
    return {name: Held(t.shape, held_boxes(t)) for name, t in named if t is not None}


def gathered(ranks: Sequence[Mapping[str, Held]]) -> dict[str, Tensor]:
    """Put the wholes together; ranks that hold the same elements must agree on them to the bit."""
    wholes: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for parts in ranks for name in parts):
        of_ranks = [parts[name] for parts in ranks if name in parts]
        boxes = [box for part in of_ranks for box in part.boxes]
        whole = torch.zeros(of_ranks[0].shape, dtype=boxes[0][1].dtype)
        is_held = torch.zeros(whole.shape, dtype=torch.bool)
        for place, box in boxes:
            whole[place], is_held[place] = box, True
        assert is_held.all(), f"no rank holds all of {name}"
        for place, box in boxes:
            assert torch.equal(whole[place], box), f"ranks differ on {name}"
        wholes[name] = whole
    return wholes
