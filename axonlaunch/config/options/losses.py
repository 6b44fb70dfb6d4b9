"""Registry of user-defined losses; ``models.specs.custom_loss`` calls them."""

from __future__ import annotations

from typing import Any

from axonlaunch.config.registry import Registry

LOSSES: Registry[Any, None] = Registry("loss", entry_points="axonlaunch.losses")
"""Losses by name; each target creates a ``CustomLoss`` (``models.specs``) from its options."""
