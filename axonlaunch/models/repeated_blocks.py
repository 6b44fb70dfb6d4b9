"""Blocks that are made alike: what a few of them show holds for all.

Building and running a hundred equal blocks without storage takes a hundred times as long as one.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

FEW = 3
"""A first block, a last one, and one that has neighbours."""


def are_alike(module: nn.Module, layers: str, *, index_names: tuple[str, ...] = ()) -> bool:
    """Say whether blocks are equal, in all that can be seen without running them.

    They are then in an ``nn.ModuleList``, so that a module can do with fewer.

    Args:
        module: What holds them.
        layers: Path of their list.
        index_names: Attributes that hold a block's number, by which it does nothing else.
    """
    blocks = module.get_submodule(layers)
    if not isinstance(blocks, nn.ModuleList):
        return False
    here = [block for block in blocks if not getattr(block, "is_stand_in", False)]
    return len({looks(block, index_names) for block in here}) == 1


def with_first_blocks(module: nn.Module, layers: str, count: int) -> nn.Module:
    """Return a copy that has as many of the first blocks."""
    blocks = module.get_submodule(layers)
    assert isinstance(blocks, nn.ModuleList)
    few = copy.deepcopy(blocks[:count]) if count < len(blocks) else None
    return copy.deepcopy(module, {} if few is None else {id(blocks): few})


def representative(
    module: nn.Module, layers: str, *, index_names: tuple[str, ...] = ()
) -> nn.Module:
    """Return a copy with a few of the blocks if all are alike, and the module itself otherwise."""
    alike = are_alike(module, layers, index_names=index_names)
    return with_first_blocks(module, layers, FEW) if alike else module


def looks(block: nn.Module, index_names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return what distinguishes a block without running it: modules, shapes, settings."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    settings = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key not in index_names
    ]
    shapes = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    return repr(block), tuple(shapes), tuple(settings)
