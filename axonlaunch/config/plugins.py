"""A user's own modules, imported for what they register or for what a ``target`` names.

They come from ``plugins`` and ``target``; what installed packages offer by entry points is imported
by the registry that lists it, and nothing else is imported on a configuration's word.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonlaunch.config.did_you_mean import unknown
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.registry import keywords_of
from axonlaunch.system.targets import load_target


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
            problems.append(_import_failure(name, error))
    return problems


def search_here() -> None:
    """Let modules of the working folder be imported, but for what is installed.

    After all others: a ``yaml.py`` that lies there is not taken for the library.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def import_target(target: str) -> Any:
    """Import ``package.module:attribute``, of the working folder or of an installed package.

    Raises:
        ValueError: The text is not of that form.
        ImportError: The module or the attribute does not exist.
    """
    search_here()
    return load_target(target)


def import_callable(
    key: str,
    target: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    passed: int = 0,
    beside: Collection[str] = (),
) -> Callable[..., Any]:
    """Import what is to be called.

    Args:
        key: Of the target, for messages; that of the arguments has ``arguments`` in its place.
        target: ``package.module:attribute``.
        arguments: With what it is called; None: that can't be said before.
        passed: How many parameters come first and are no arguments.
        beside: Keywords that it is called with beside the arguments.

    Raises:
        ConfigError: It can't be imported or called, or does not take these arguments.
    """
    try:
        builder = import_target(target)
    except Exception as error:  # a user's module may fail in any way
        from axonlaunch.system.frame_origin import place_in_user_code

        then = "write package.module:name, importable from where you start"
        issue = ConfigIssue(key, f"{error}; {then}", target)
        if place_in_user_code(error):  # the module was found, and fails
            issue = ConfigIssue.of_failure(key, "importing it", error, target)
        raise ConfigError([issue]) from error
    if not callable(builder):
        message = f"is {type(builder).__name__}, not a class or function"
        raise ConfigError([ConfigIssue(key, message, target)])
    if arguments is not None:
        _check_arguments(builder, arguments, key=key, target=target, passed=passed, beside=beside)
    imported: Callable[..., Any] = builder
    return imported


def _check_arguments(
    builder: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    key: str,
    target: str,
    passed: int,
    beside: Collection[str],
) -> None:
    """Refuse arguments that what is called does not take, and that it misses some.

    Raises:
        ConfigError: It says which it takes.
    """
    known = keywords_of(builder, passed=passed)
    place = f"{key.rpartition('.')[0]}.arguments"
    issues = [
        ConfigIssue(f"{place}.{name}", unknown("argument", name, known), value)
        for name, value in arguments.items()
        if known is not None and name not in known
    ]
    if issues:
        raise ConfigError(issues)
    try:
        signature = inspect.signature(builder)
    except (ValueError, TypeError):
        return  # some of what is written in C has none
    try:
        signature.bind(*[None] * passed, **{**dict.fromkeys(beside), **arguments})
    except TypeError as error:
        takes = [name for name in [*signature.parameters][passed:] if name not in beside]
        message = f"{error}; arguments that it takes: {', '.join(takes) or 'none'}"
        raise ConfigError([ConfigIssue(key, message, target)]) from error


def _import_failure(name: str, error: BaseException) -> ConfigIssue:
    if isinstance(error, ModuleNotFoundError) and error.name == name.partition(":")[0]:
        message = f"there is no module {name}; looked in {Path.cwd()} and the installed packages"
        return ConfigIssue("plugins", message, name)
    return ConfigIssue.of_failure("plugins", f"importing {name}", error, name)
