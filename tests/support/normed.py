"""A user's model with running statistics, for ``model=custom``."""

from __future__ import annotations

from torch import nn


def build() -> nn.Module:
    """Return a perceptron with batch normalization."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
    )
