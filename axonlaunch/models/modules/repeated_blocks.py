"""Compares the repeated blocks of a model, so that a few of them can represent all.

Building and running a hundred equal blocks without storage takes a hundred times as long as one.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from axonlaunch.models.modules.placeholder import Placeholder

FEW = 3
"""Number of representative blocks: the first, the last, and one with two neighbors."""


def are_alike(module: nn.Module, layers: str, *, index_names: tuple[str, ...] = ()) -> bool:
    """Return whether all blocks are equal, as far as can be determined without running them.

    The blocks must be in an ``nn.ModuleList``, so that some of them can be removed.

    Args:
        module: Module that contains the blocks.
        layers: Path of the list of blocks.
        index_names: Attributes that hold the number of a block without effect on its computation.
    """
    return num_leading(module, layers, index_names=index_names) == 0


def num_leading(module: nn.Module, layers: str, *, index_names: tuple[str, ...] = ()) -> int | None:
    """Return the number of blocks before equal ones; None if the last two blocks differ.

    Args:
        module: Module that contains the blocks, in an ``nn.ModuleList``.
        layers: Path of the list of blocks.
        index_names: Attributes that hold the number of a block without effect on its computation.
    """
    blocks = module.get_submodule(layers)
    if not isinstance(blocks, nn.ModuleList):
        return None
    present = [block for block in blocks if not isinstance(block, Placeholder)]
    if not present:
        return None
    keys = [block_key(block, index_names) for block in present]
    leading = next((n for n in range(len(keys) - 1, 0, -1) if keys[n - 1] != keys[-1]), 0)
    return leading if leading < len(keys) - 1 or len(keys) == 1 else None


def with_first_blocks(module: nn.Module, layers: str, count: int) -> nn.Module:
    """Return a copy of a module with only the first ``count`` blocks."""
    return _with_blocks(module, layers, slice(count))


def without_first_blocks(module: nn.Module, layers: str, count: int) -> nn.Module:
    """Return a copy of a module without the first ``count`` blocks.

    Lists with an entry for each block in the copied configurations get shorter too, because
    transformers reads the kind of the n-th block from ``config.layer_types[n]`` in forwards.
    """
    blocks: Any = module.get_submodule(layers)
    copied = _with_blocks(module, layers, slice(count, None))
    configs = {id(config): config for part in copied.modules() if (config := _config_of(part))}
    for config in configs.values():
        for name, value in config.items():
            if isinstance(value, list) and len(value) == len(blocks):
                config[name] = value[count:]
    return copied


def _config_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module's configuration, not a copy of them."""
    attributes: dict[str, Any] = getattr(getattr(module, "config", None), "__dict__", {})
    return attributes


def _with_blocks(module: nn.Module, layers: str, chosen: slice) -> nn.Module:
    blocks = module.get_submodule(layers)
    assert isinstance(blocks, nn.ModuleList)
    copies: dict[int, Any] = {}
    copies[id(blocks)] = copy.deepcopy(blocks[chosen], copies)
    return copy.deepcopy(module, copies)


def representative(
    module: nn.Module, layers: str, *, index_names: tuple[str, ...] = ()
) -> nn.Module:
    """Return a copy with ``FEW`` blocks if all blocks are equal, otherwise the module itself."""
    alike = are_alike(module, layers, index_names=index_names)
    return with_first_blocks(module, layers, FEW) if alike else module


def block_key(block: nn.Module, index_names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return a key of modules, shapes and settings that is the same for equal blocks."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    settings = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key not in index_names
    ]
    shapes = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    return repr(block), tuple(shapes), tuple(settings)
