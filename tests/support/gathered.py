"""Assembles full tensors from the shards of a mock world's ranks, without a collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axonlaunch.models.tensors.dtensor_regions import held_boxes


class Held(NamedTuple):
    """A rank's shard of a tensor and its position in the full tensor."""

    shape: torch.Size
    boxes: list[tuple[tuple[Any, ...], Tensor]]


def held(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Held]:
    """Copy this rank's shard of each tensor. All ranks of the mesh must call this."""
    return {name: Held(t.shape, held_boxes(t)) for name, t in named if t is not None}


def gathered(ranks: Sequence[Mapping[str, Held]]) -> dict[str, Tensor]:
    """Assemble full tensors. Ranks that hold the same elements must have bitwise equal values."""
    full_tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for parts in ranks for name in parts):
        of_ranks = [parts[name] for parts in ranks if name in parts]
        boxes = [box for part in of_ranks for box in part.boxes]
        full = torch.zeros(of_ranks[0].shape, dtype=boxes[0][1].dtype)
        is_held = torch.zeros(full.shape, dtype=torch.bool)
        for offsets, box in boxes:
            full[offsets], is_held[offsets] = box, True
        assert is_held.all(), f"no rank holds all of {name}"
        for offsets, box in boxes:
            assert torch.equal(full[offsets], box), f"ranks differ on {name}"
        full_tensors[name] = full
    return full_tensors
