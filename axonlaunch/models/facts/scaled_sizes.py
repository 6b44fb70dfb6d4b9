"""Sizes of a model that planning scales: width, heads and repeated blocks.

Sizes that a model's configuration does not have are 0, and planning does not scale them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class ScaledSizes:
    """Sizes of a model.

    Attributes:
        hidden_size: Size of the hidden state of each position.
        num_attention_heads: Query heads of each attention layer.
        num_key_value_heads: Key-value heads of each attention layer.
        num_blocks: Number of blocks; the model can be built with fewer. 0 if it can't.
        period: Number of blocks after which the kinds of blocks repeat: 6 if every sixth block
            attends to all positions.
        leading: Number of blocks before the repeated ones, such as dense blocks before mixtures of
            experts.
    """

    hidden_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    num_blocks: int = 0
    period: int = 1
    leading: int = 0

    @classmethod
    def of(cls, sizes: Any, *, num_blocks: int, period: int = 1, leading: int = 0) -> Self:
        """Read width and heads from an object with Hugging Face's names; it may lack some.

        Args:
            sizes: Configuration of a model.
            num_blocks: See the attribute.
            period: See the attribute.
            leading: See the attribute.
        """
        heads = getattr(sizes, "num_attention_heads", None) or 0
        return cls(
            hidden_size=getattr(sizes, "hidden_size", None) or 0,
            num_attention_heads=heads,
            num_key_value_heads=getattr(sizes, "num_key_value_heads", None) or heads,
            num_blocks=num_blocks,
            period=period,
            leading=leading,
        )
