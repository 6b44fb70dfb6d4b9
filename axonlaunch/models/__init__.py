"""Model implementations for one device, one file each, and the registry that lists them.

Importing this package does not import torch; the code of a model is imported at its first use.
"""

from __future__ import annotations

from axonlaunch.config.options.model import MODELS
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.specs.registry import register_model

__all__ = ["MODELS", "ModelSpec", "register_model"]
