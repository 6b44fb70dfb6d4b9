"""A few equal blocks can represent all; unequal ones can't."""

from __future__ import annotations

from typing import Any

import torch
from support.hf_families import theirs
from torch import Tensor, nn

from axonlaunch.models.modules.repeated_blocks import (
    FEW,
    representative,
    with_first_blocks,
    without_first_blocks,
)


def model(*sizes: int) -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(size, size) for size in sizes)
    return module


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


def masks_of_blocks(module: Any) -> list[Tensor | None]:
    """Return the attention mask that each block gets for tokens beyond the sliding window."""
    masks: list[Tensor | None] = []
    hooks = [
        block.register_forward_pre_hook(
            lambda _, __, named: masks.append(named["attention_mask"]), with_kwargs=True
        )
        for block in module.model.layers
    ]
    module(torch.arange(32)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return masks


def test_blocks_after_left_out_ones_keep_their_attention_mask() -> None:
    full = theirs(
        "qwen3_moe",
        model_type="afmoe",
        num_hidden_layers=7,
        num_dense_layers=2,
        global_attn_every_n_layers=4,
        num_shared_experts=1,
        sliding_window=8,
    )
    types = [*full.config.layer_types]
    expected = masks_of_blocks(full)
    for mask, other in zip(
        masks_of_blocks(without_first_blocks(full, "model.layers", 2)), expected[2:], strict=True
    ):
        torch.testing.assert_close(mask, other)
    assert full.config.layer_types == types
    assert len({mask is None for mask in expected}) == 2
