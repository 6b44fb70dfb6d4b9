"""A user's own modules, imported so that what they register has a name.

They come from ``plugins`` and from the entry points of installed packages; nothing else is
imported on a configuration's word.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Container, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from axonlaunch.config.errors import ConfigIssue

ENTRY_POINT_GROUP = "axonlaunch.models"


def import_plugins(modules: Sequence[str]) -> list[ConfigIssue]:
    """Import modules by name, the working folder's included; return what went wrong."""
    problems = []
    for name in modules:
        search_here()
        try:
            # What a module prints while it is imported must not mix with a command's output.
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a user's module may fail in any way
            problems.append(ConfigIssue("plugins", _reason(name, error), name))
    return problems


def search_here() -> None:
    """Let modules of the working folder be imported, but for what is installed.

    After all others: a ``yaml.py`` that lies there is not taken for the library.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def import_entry_point(model: str, known: Container[str]) -> list[ConfigIssue]:
    """Import the installed package that offers a model of this name, if it is not known yet."""
    if model in known:
        return []
    problems = []
    for point in entry_points(group=ENTRY_POINT_GROUP, name=model):
        try:
            point.load()
        except Exception as error:  # someone else's package may fail in any way
            problems.append(ConfigIssue("model.name", _reason(point.value, error), model))
    return problems


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name.partition(":")[0]:
        return f"there is no module {name}; looked in {Path.cwd()} and the installed packages"
    return f"importing {name} failed with {type(error).__name__}: {error}"
