"""A user's model with a layer that no forward calls, for ``model=custom``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Unused(nn.Module):
    """A linear layer, and another that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, ...] to logits [B, 10]."""
        logits: Tensor = self.used(torch.flatten(images, 1))
        return logits


def build() -> nn.Module:
    return Unused()
