"""Losses of one's own: the table of those that are registered.

It holds names; what a loss computes is ``models.own_loss``'s to call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from axonlaunch.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class FreeLossConfig:
    """Options of a registered loss that brought no dataclass of its own."""

    name: str = ""
    """name of the loss"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the loss"""


LOSSES: Registry[Any, None] = Registry(
    "loss", entry_points="axonlaunch.losses", free_config=FreeLossConfig
)
"""Each stands for what makes a ``models.own_loss.OwnLoss`` of its options."""
