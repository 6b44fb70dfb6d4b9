"""Finds the folder of a run that has the configuration of another run and a name of its own.

A frozen ``config.yaml`` has a run's name and its folder, so another name needs another folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.values.environment_values import resolve_variables, to_interpolations


def folder_of_other_name(tree: Mapping[str, Any], file: Mapping[str, Any]) -> str | None:
    """Return the folder of a run with another name than its file has.

    It is beside the folder in the file: ``name=second`` changes ``/data/first`` to
    ``/data/second`` if the file has the name ``first``.

    Args:
        tree: Composed tree with another name.
        file: Content of the user's file.

    Returns:
        None if the name is that of the file, or the file has no folder that ends with its name.
    """
    if not file.get("name") or file.get("run_dir", "auto") == "auto":
        return None
    first, name = str(file["name"]), str(to_interpolations(tree["name"]))
    folder = str(to_interpolations(tree["run_dir"])).rstrip("/")
    parent = folder.removesuffix(first)
    if name == first or parent == folder or not f"/{parent}".endswith("/"):
        return None
    beside: str = resolve_variables(parent + name, os.environ)
    return beside
