"""The figures of a model that planning scales: its width, its heads, its repeated blocks.

Of a model whose configuration has no such figures they are 0, and nothing is scaled by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonlaunch.config.model import HuggingFaceConfig

_DEPTH = "num_hidden_layers"


@dataclass(frozen=True)
class ModelFigures:
    """What planning knows of a model beside its traces.

    Attributes:
        hidden_size: Numbers of each position between blocks.
        num_attention_heads: Of each attention.
        num_key_value_heads: Of these, those with keys and values of their own.
        num_blocks: Repeated blocks of which a model can have fewer; 0: it can't.
        period: Blocks after which their kinds come again: 6, where one in six attends to all.
    """

    hidden_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    num_blocks: int = 0
    period: int = 1


def model_figures(model: Any) -> ModelFigures:
    """Return the figures of a model by its configuration.

    Raises:
        ConfigError: It can't be built.
    """
    if isinstance(model, HuggingFaceConfig):
        from axonlaunch.models.hf.figures import period

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
    """Return the settings of a run that give its model so many blocks.

    Args:
        model: The model's configuration, which has ``num_blocks``.
        count: Blocks, whole periods of them.
    """
    if isinstance(model, HuggingFaceConfig):
        return {"model.config": {**model.config, _DEPTH: count}}
    return {f"model.{_DEPTH}": count}
