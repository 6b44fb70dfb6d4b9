"""A model with a configuration of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

import axonlaunch as ax


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Blocks of a linear layer on embedded tokens."""

    name: str = "tiny"
    """name of the model"""
    width: int = field(default=16, metadata={"min": 1})
    """width of the residual stream"""
    depth: int = field(default=2, metadata={"min": 1})
    """blocks"""
    vocab_size: int = field(default=64, metadata={"min": 1})
    """tokens that the model knows"""


@ax.register_model("tiny", config=TinyConfig, layers="blocks", inputs="tokens")
class Tiny(nn.Module):
    """Linear blocks on embedded tokens."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(
            nn.Linear(config.width, config.width) for _ in range(config.depth)
        )
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, T] to logits [B, T, V]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)
