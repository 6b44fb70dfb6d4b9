"""Paths in the user's home folder, which a user of a container may not have."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from axonlaunch.system.storage.cache import home_folder


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with its ``~/`` or ``~USER/`` replaced; unchanged if there is no such user."""
    path = Path(path)
    if path.parts[:1] == ("~",):
        return home_folder().joinpath(*path.parts[1:])
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def expand_home_in(tree: Any, *, unchanged: Collection[str] = (), key: str = "") -> Any:
    """Return nested plain values with the home folder in place of each leading ``~/``.

    Args:
        tree: Nested plain values.
        unchanged: Dotted keys whose values are returned as they are.
        key: Dotted key of ``tree``; empty for the root.
    """
    if key in unchanged:
        return tree
    if isinstance(tree, dict):
        prefix = f"{key}." if key else ""
        return {
            name: expand_home_in(value, unchanged=unchanged, key=f"{prefix}{name}")
            for name, value in tree.items()
        }
    if isinstance(tree, list):
        return [expand_home_in(value) for value in tree]
    if isinstance(tree, str) and tree.startswith("~/"):
        return str(expand_home(tree))
    return tree
