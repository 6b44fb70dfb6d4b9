"""After how many blocks those of a model of transformers repeat, so that fewer stand for all.

A model whose kinds of blocks don't come in turn, or that can't be built with fewer, has no period.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from axonlaunch.config.errors import ConfigError
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.models.hf.structure import Structure, structure
from axonlaunch.models.repeated_blocks import looks

_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx", "layer_index")
"""Attributes of a block's modules that hold its number."""


@dataclass(frozen=True)
class Period:
    """How the blocks of a model repeat.

    Attributes:
        typed: Transformers' configuration of the model.
        num_blocks: All of them; 0: fewer can't stand for them.
        period: Blocks after which their kinds come again.
    """

    typed: Any
    num_blocks: int = 0
    period: int = 1


def period(config: HuggingFaceConfig) -> Period:
    """Return how the blocks of a model repeat.

    Raises:
        ConfigError: It can't be built.
    """
    whole = structure(config)
    kinds = _kinds(whole)
    repeated = next((p for p in range(1, len(kinds) // 2 + 1) if kinds[p:] == kinds[:-p]), None)
    if repeated is None:
        return Period(whole.typed)
    fewer = replace(config, config={**config.config, "num_hidden_layers": repeated})
    try:
        is_first = _kinds(structure(fewer)) == kinds[:repeated]
    except ConfigError:
        is_first = False
    return Period(whole.typed, len(kinds), repeated) if is_first else Period(whole.typed)


def _kinds(model: Structure) -> list[Any]:
    """Return what each block looks like, its number and its type."""
    if model.layers is None:
        return []
    blocks: Any = model.model.get_submodule(model.layers)
    return [(kind, looks(block, _NUMBERS)) for kind, block in zip(model.kinds, blocks, strict=True)]
