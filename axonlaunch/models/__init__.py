"""Model implementations for one device, one file each, and the registry that lists them.

Importing this package does not import torch; the code of a model is imported at its first use.
"""

from __future__ import annotations

from axonlaunch.config.options.model import MODELS
from axonlaunch.models.specs.registry import register_model
from axonlaunch.models.specs.spec import ModelSpec

__all__ = ["MODELS", "ModelSpec", "register_model"]
