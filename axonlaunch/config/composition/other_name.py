"""Moves the folders of a run that has another run's settings and a name of its own.

A frozen ``config.yaml`` has a run's name and its folders, so another name needs other folders.
"""

from __future__ import annotations

import os
from collections.abc import Set
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

from axonlaunch.config.values.environment_values import (
    mark_environment,
    resolve_variables,
    to_interpolations,
)
from axonlaunch.config.values.plain_values import flatten

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FOLDERS = {"run_dir", "checkpoint.path"}
"""Keys of the folders that may end with the name of the run."""


def use_other_name(tree: dict[str, Any], in_files: DictConfig, *, given: Set[str]) -> list[str]:
    """Move the folders of a run with another name than its files have, and return their keys.

    A folder is moved if it ends with the name in the files: ``name=second`` changes ``/data/first``
    to ``/data/second`` if the files have the name ``first``.

    Args:
        tree: Composed tree with the name of the run; its folders are changed.
        in_files: Composed tree without the override of the name.
        given: Keys that the user overrides; they are not changed.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    try:
        first = OmegaConf.select(in_files, "name")
    except InterpolationResolutionError:  # of an unset variable, which the other name replaces
        return []
    if first in (None, "", "auto"):
        return []
    resolved = OmegaConf.to_container(in_files, resolve=True, throw_on_missing=False)
    named, _ = mark_environment(resolved, in_files)
    in_file, moved = flatten(named), []
    for key in flatten(tree).keys() & _FOLDERS - given:
        if (folder := _beside(in_file.get(key), named["name"], tree["name"])) is not None:
            *sections, last = key.split(".")
            reduce(getitem, sections, tree)[last] = folder
            moved.append(key)
    return moved


def _beside(folder: Any, first: Any, name: Any) -> str | None:
    """Return the folder for another name; None if the folder does not end with the first one."""
    if folder is None:
        return None
    folder, first, name = (str(to_interpolations(value)) for value in (folder, first, name))
    parent = folder.rstrip("/").removesuffix(first)
    if name == first or parent == folder.rstrip("/") or not f"/{parent}".endswith("/"):
        return None
    beside: str = resolve_variables(parent + name, os.environ)
    return beside
