"""A loss with an option."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

import axonlaunch as ax


@dataclass(frozen=True, kw_only=True)
class SmoothedConfig:
    """Cross entropy that is not sure."""

    name: str = "smoothed"
    """name of the loss"""
    by: float = field(default=0.1, metadata={"min": 0, "below": 1})
    """share of a target that is spread over all classes"""


@ax.register_loss("smoothed", config=SmoothedConfig)
def smoothed(outputs: Tensor, batch: dict[str, Any], options: SmoothedConfig) -> Tensor:
    """Cross entropy of smoothed targets."""
    targets = batch["targets"].flatten()
    return cross_entropy(
        outputs.flatten(0, 1), targets, label_smoothing=options.by, reduction="sum"
    )
