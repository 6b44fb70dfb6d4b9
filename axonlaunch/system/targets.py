"""Functions and classes named by text, ``"package.module:attribute"``, and imported on use.

Whoever names one need not import it: the parent names what only a rank imports.
"""

from __future__ import annotations

import importlib
from typing import Any


def load_target(target: str) -> Any:
    """Import ``"package.module:attribute"``.

    Raises:
        ValueError: The text is not of that form.
        ImportError: The module or the attribute does not exist.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{target!r} is not of the form package.module:attribute")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)
