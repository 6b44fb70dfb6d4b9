"""Models, a file each, written for one device, and the registry that lists them.

Importing it imports no torch; a name's code is imported when it is first asked for.
"""

from __future__ import annotations

from axonlaunch.models.registry import MODELS, announce_entry_points, register_model
from axonlaunch.models.spec import ModelSpec

__all__ = ["MODELS", "ModelSpec", "register_model"]

announce_entry_points()
