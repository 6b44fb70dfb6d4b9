"""Models, a file each, written for one device, and the registry that lists them.

Importing it imports no torch; a name's code is imported when it is first asked for.
"""

from __future__ import annotations

from axonlaunch.config.model import MODELS
from axonlaunch.models.registry import register_model
from axonlaunch.models.spec import ModelSpec

__all__ = ["MODELS", "ModelSpec", "register_model"]
