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
from axonlaunch.models.hf.analysis.expert_modules import expert_modules
from axonlaunch.models.hf.analysis.structure import Structure, structure
from axonlaunch.models.hf.architecture import canonical
from axonlaunch.models.hf.reading import files
from axonlaunch.models.modules.repeated_blocks import block_key

_INDEX_NAMES = ("layer_idx", "layer_id", "layer_number", "block_idx", "layer_index")
"""Attributes of a block's modules that hold its number."""
_MOST_PERIODS = 8
"""Largest number of periods that planning traces: two in each of four pipeline stages."""


def scaled_sizes(config: TransformersModel) -> ScaledSizes:
    """Return a model's sizes; ``num_blocks`` is 0 if fewer blocks can't represent all.

    That is also the case if blocks before the repeated ones have experts, because planning assumes
    that only repeated blocks have some.

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
    sizes = ScaledSizes.of(full_model.typed, num_blocks=len(kinds), period=period, leading=leading)
    traced = (leading + period, leading + _MOST_PERIODS * period)
    if _has_leading_experts(full_model, leading) or not all(
        _repeats(config, sizes, kinds, count) for count in traced
    ):
        return ScaledSizes.of(full_model.typed, num_blocks=0)
    return sizes


def with_depth(config: TransformersModel, count: int, sizes: ScaledSizes) -> dict[str, Any]:
    """Return ``model.config`` with another number of blocks.

    Lists with an entry for each block, such as ``layer_types``, get as many entries.

    Args:
        config: Configuration of the model.
        count: New number of blocks, also more than the model has.
        sizes: Sizes of the model, with its period.

    Raises:
        ConfigError: The model can't be built.
    """
    typed, depth, leading = structure(config).typed, sizes.num_blocks, sizes.leading
    chosen = [n if n < depth else leading + (n - leading) % sizes.period for n in range(count)]
    given = canonical({**files.read_config(config), **config.config}, type(typed))
    lists = {
        name: [value[n] for n in chosen]
        for name in given
        if isinstance(value := getattr(typed, name, None), list) and len(value) == depth
    }
    return {**config.config, **lists, "num_hidden_layers": count}


def _repeats(config: TransformersModel, sizes: ScaledSizes, kinds: list[Any], count: int) -> bool:
    """Return whether a model with this number of blocks can be built and has the same period."""
    leading, period = sizes.leading, sizes.period
    expected = kinds[: leading + period]
    expected += expected[leading:] * ((count - leading) // period - 1)
    try:
        return (
            _kinds(structure(replace(config, config=with_depth(config, count, sizes)))) == expected
        )
    except ConfigError:
        return False


def _has_leading_experts(model: Structure, leading: int) -> bool:
    first = tuple(f"{model.layers}.{number}." for number in range(leading))
    return any(name.startswith(first) for name in expert_modules(model.model))


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
        (kind, block_key(block, _INDEX_NAMES), _unquantized_in(model, number))
        for number, (kind, block) in enumerate(zip(model.kinds, blocks, strict=True))
    ]


def _unquantized_in(model: Structure, number: int) -> frozenset[str]:
    """Return the names in a block of its modules that are not quantized in the model's files."""
    prefix = f"{model.layers}.{number}."
    names = (name for name in model.unquantized if name.startswith(prefix))
    return frozenset(name.removeprefix(prefix) for name in names)
