"""A few equal blocks can represent all; unequal ones can't."""

from __future__ import annotations

import torch
from torch import nn

from axonlaunch.models.modules.repeated_blocks import FEW, representative, with_first_blocks


def model(*sizes: int) -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList(nn.Linear(size, size) for size in sizes)
    return made


def test_equal_blocks_are_represented_by_few() -> None:
    full = model(*[4] * 9)
    few = representative(full, "layers")
    assert [*few.state_dict()] == [
        f"layers.{n}.{k}" for n in range(FEW) for k in ("weight", "bias")
    ]
    assert len(full.layers) == 9  # type: ignore[arg-type]


def test_model_with_unequal_block_is_not_reduced() -> None:
    full = model(4, 4, 4, 4, 5)
    assert representative(full, "layers") is full


def test_first_blocks_are_copies() -> None:
    full = model(4, 5, 6)
    first = with_first_blocks(full, "layers", 2)
    with torch.no_grad():
        first.layers[0].weight.zero_()  # type: ignore[index, union-attr]
    assert [tuple(p.shape) for p in first.parameters() if p.ndim == 2] == [(4, 4), (5, 5)]
    assert full.layers[0].weight.count_nonzero()  # type: ignore[index, union-attr]
