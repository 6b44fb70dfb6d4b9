"""Imports functions and classes by name, ``"package.module:attribute"``.

The name can be passed on without importing the module: the parent process names functions that only
a rank imports.
"""

from __future__ import annotations

import importlib
from typing import Any


def load_target(target: str) -> Any:
    """Import ``"package.module:attribute"``.

    Raises:
        ValueError: The text does not have this form.
        ImportError: The module or the attribute does not exist.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{target!r} is not of the form package.module:attribute")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)
