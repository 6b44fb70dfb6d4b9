"""Sizes of a model that planning scales: width, heads and repeated blocks.

Sizes that a model's configuration does not have are 0, and planning does not scale them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonlaunch.config.options.model import HuggingFaceConfig

_DEPTH = "num_hidden_layers"


@dataclass(frozen=True)
class ModelFigures:
    """Sizes of a model.

    Attributes:
        hidden_size: Size of the hidden state of each position.
        num_attention_heads: Query heads of each attention layer.
        num_key_value_heads: Key-value heads of each attention layer.
        num_blocks: Repeated blocks; the model can be built with fewer. 0 if it can't.
        period: Number of blocks after which the kinds of blocks repeat: 6 if every sixth block
            attends to all positions.
    """

    hidden_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    num_blocks: int = 0
    period: int = 1


def model_figures(model: Any) -> ModelFigures:
    """Return the sizes from a model's configuration.

    Raises:
        ConfigError: The model can't be built.
    """
    if isinstance(model, HuggingFaceConfig):
        from axonlaunch.models.hf.analysis.figures import period

        blocks = period(model)
        typed, num_blocks, repeated = blocks.typed, blocks.num_blocks, blocks.period
    else:
        typed, num_blocks, repeated = model, getattr(model, _DEPTH, 0), 1
    heads = getattr(typed, "num_attention_heads", None) or 0
    return ModelFigures(
        hidden_size=getattr(typed, "hidden_size", None) or 0,
        num_attention_heads=heads,
        num_key_value_heads=getattr(typed, "num_key_value_heads", None) or heads,
        num_blocks=num_blocks,
        period=repeated,
    )


def of_blocks(model: Any, count: int) -> dict[str, Any]:
    """Return the settings of a run that change the number of blocks.

    Args:
        model: Configuration of a model with ``num_blocks`` > 0.
        count: New number of blocks, a multiple of the period.
    """
    if isinstance(model, HuggingFaceConfig):
        return {"model.config": {**model.config, _DEPTH: count}}
    return {f"model.{_DEPTH}": count}
