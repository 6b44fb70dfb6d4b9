"""Finds the period of a transformers model's blocks, so that fewer blocks can represent all.

Other blocks may precede the repeated ones. If the kinds of blocks don't repeat regularly, or the
model can't be built with fewer blocks, there is no period.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.hf.analysis.structure import Structure, structure
from axonlaunch.models.modules.repeated_blocks import block_key

_INDEX_NAMES = ("layer_idx", "layer_id", "layer_number", "block_idx", "layer_index")
"""Attributes of a block's modules that hold its number."""


def scaled_sizes(config: TransformersModel) -> ScaledSizes:
    """Return a model's sizes; ``num_blocks`` is 0 if fewer blocks can't represent all.

    Raises:
        ConfigError: The model can't be built.
    """
    full_model = structure(config)
    kinds = _kinds(full_model)
    for leading in range(len(kinds) - 1):
        if period := _period(kinds[leading:]):
            break
    else:
        return ScaledSizes.of(full_model.typed, num_blocks=0)
    fewest = leading + period
    fewer = replace(config, config={**config.config, "num_hidden_layers": fewest})
    try:
        is_prefix = _kinds(structure(fewer)) == kinds[:fewest]
    except ConfigError:
        is_prefix = False
    if not is_prefix:
        return ScaledSizes.of(full_model.typed, num_blocks=0)
    return ScaledSizes.of(full_model.typed, num_blocks=len(kinds), period=period, leading=leading)


def _period(kinds: list[Any]) -> int:
    """Return the number of kinds after which they repeat; 0 if they don't."""
    periods = range(1, len(kinds) // 2 + 1)
    return next((p for p in periods if kinds[p:] == kinds[:-p]), 0)


def _kinds(model: Structure) -> list[Any]:
    """Return a key for each block that is the same for equal blocks."""
    if model.layers is None:
        return []
    blocks: Any = model.model.get_submodule(model.layers)
    return [
        (kind, block_key(block, _INDEX_NAMES))
        for kind, block in zip(model.kinds, blocks, strict=True)
    ]
