"""Registry of user-defined losses; ``models.specs.custom_loss`` calls them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from axonlaunch.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class FreeLossConfig:
    """Options of a loss that was registered without a dataclass."""

    name: str = ""
    """name of the loss"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the loss"""


LOSSES: Registry[Any, None] = Registry(
    "loss", entry_points="axonlaunch.losses", free_config=FreeLossConfig
)
"""Losses by name; each target creates a ``CustomLoss`` (``models.specs``) from its options."""
