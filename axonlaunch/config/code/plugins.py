"""Imports user code that a configuration names in ``plugins`` or in a ``target``.

Entry points of installed packages are imported by the registries. A configuration can't import
anything else.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.config.registry import keywords_of
from axonlaunch.system.processes.targets import load_target


def import_plugins(modules: Sequence[str]) -> list[ConfigIssue]:
    """Import modules by name, also from the working folder; return the problems."""
    problems = []
    for name in modules:
        search_here()
        try:
            # Text that a module prints during import must not mix with the output of the command.
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # user code can fail in any way
            problems.append(_import_failure(name, error))
    return problems


def search_here() -> None:
    """Add the working folder to the end of the module search path.

    Installed packages have priority, so a file ``yaml.py`` in the folder does not hide the library.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def import_target(target: str) -> Any:
    """Import ``package.module:attribute`` from the working folder or an installed package.

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
    extra_keywords: Collection[str] = (),
) -> Callable[..., Any]:
    """Import a callable and check its arguments.

    Args:
        key: Dotted key of the target, for messages; the key of the arguments is next to it.
        target: ``package.module:attribute``.
        arguments: Keyword arguments of the later call; None skips the check of arguments.
        passed: Number of leading parameters that are not arguments.
        extra_keywords: Keywords that the later call passes in addition to the arguments.

    Raises:
        ConfigError: The target can't be imported or called, or does not accept the arguments.
    """
    try:
        builder = import_target(target)
    except Exception as error:  # user code can fail in any way
        from axonlaunch.system.frame_origin import place_in_user_code

        hint = "write package.module:name, importable from where you start"
        issue = ConfigIssue(key, f"{error}; {hint}", target)
        if place_in_user_code(error):  # the module was found, but failed
            issue = ConfigIssue.of_failure(key, "importing it", error, target)
        raise ConfigError([issue]) from error
    if not callable(builder):
        message = f"is {type(builder).__name__}, not a class or function"
        raise ConfigError([ConfigIssue(key, message, target)])
    if arguments is not None:
        _check_arguments(
            builder, arguments, key=key, target=target, passed=passed, extra_keywords=extra_keywords
        )
    imported: Callable[..., Any] = builder
    return imported


def _check_arguments(
    builder: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    key: str,
    target: str,
    passed: int,
    extra_keywords: Collection[str],
) -> None:
    """Check that a callable accepts the arguments, and that all required ones are there.

    Raises:
        ConfigError: An argument is unknown or missing; the message lists the accepted ones.
    """
    accepted = keywords_of(builder, passed=passed)
    arguments_key = f"{key.rpartition('.')[0]}.arguments"
    issues = [
        ConfigIssue(f"{arguments_key}.{name}", unknown("argument", name, accepted), value)
        for name, value in arguments.items()
        if accepted is not None and name not in accepted
    ]
    if issues:
        raise ConfigError(issues)
    try:
        signature = inspect.signature(builder)
    except (ValueError, TypeError):
        return  # some objects written in C have no signature
    try:
        signature.bind(*[None] * passed, **{**dict.fromkeys(extra_keywords), **arguments})
    except TypeError as error:
        takes = [name for name in [*signature.parameters][passed:] if name not in extra_keywords]
        message = f"{error}; arguments that it takes: {', '.join(takes) or 'none'}"
        raise ConfigError([ConfigIssue(key, message, target)]) from error


def _import_failure(name: str, error: BaseException) -> ConfigIssue:
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        message = f"is a path; write the name of the module, as in plugins=[{module}]"
        return ConfigIssue("plugins", message, name)
    if isinstance(error, ModuleNotFoundError) and error.name == name.partition(":")[0]:
        message = f"there is no module {name}; looked in {Path.cwd()} and the installed packages"
        return ConfigIssue("plugins", message, name)
    return ConfigIssue.of_failure("plugins", f"importing {name}", error, name)
