"""Configuration of a run: composed by Hydra, typed by dataclasses, checked by rules.

``load`` is the entry point. Its result consists of dataclasses and contains no DictConfig.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.code.trust import foreign_code
from axonlaunch.config.composition.compose import OVERRIDE_ORIGIN, Composed, Composer
from axonlaunch.config.composition.unset_values import with_training_defaults, without_alternatives
from axonlaunch.config.composition.user_file import split_file
from axonlaunch.config.consistency.rules import find_rule_violations
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.config.schema import REGISTRIES, RunConfig
from axonlaunch.config.validation.number_texts import with_number_texts
from axonlaunch.config.validation.validate import validate
from axonlaunch.config.values.environment_values import resolve_variables, to_interpolations
from axonlaunch.config.values.plain_values import (
    LARGEST_YAML,
    flatten,
    number_text,
    read_yaml,
    to_tree,
    to_yaml,
    with_values,
)
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.run_files import CONFIG
from axonlaunch.system.storage.trusted_files import is_trusted

__all__ = [
    "CONFIG",
    "Composed",
    "Composer",
    "ConfigError",
    "ConfigIssue",
    "RunConfig",
    "compose",
    "composer_of",
    "flatten",
    "import_code",
    "load",
    "parse_frozen",
    "read_frozen",
    "suggest_run_folder",
    "to_interpolations",
    "to_tree",
    "to_yaml",
    "type_config",
    "with_values",
]


def load(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[str | Path] = (),
) -> RunConfig:
    """Compose, type and check a configuration.

    Args:
        overrides: Hydra overrides, ``["strategy=fsdp", "train.steps=10"]``.
        config_name: Name of the primary config.
        config_dirs: Folders with YAML of the user, searched before the included ones.

    Raises:
        ConfigError: The configuration is invalid; the error lists all problems that can be detected
            without torch.
    """
    composed = compose(overrides, config_name=config_name, config_dirs=config_dirs)
    return type_config(composed.tree, composed.problems, origins=composed.origins)


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[str | Path] = (),
) -> Composed:
    """Compose a configuration without typing it; the result knows the origin of each value.

    Args:
        overrides: Hydra overrides, as in ``load``.
        config_name: Name of the primary config.
        config_dirs: Folders with YAML of the user, searched before the included ones.

    Returns:
        The composed tree. Problems of single overrides are in ``problems``.

    Raises:
        ConfigError: The YAML files can't be composed.
    """
    composer = composer_of(config_dirs) if config_dirs else _included_composer()
    composed, issues = _compose_with_plugins(composer, overrides, config_name)
    composed = dataclasses.replace(composed, problems=issues + composed.problems)
    tree = with_number_texts(composed.tree, composed.number_text)
    return with_training_defaults(without_alternatives(dataclasses.replace(composed, tree=tree)))


def _compose_with_plugins(
    composer: Composer, overrides: Sequence[str], config_name: str
) -> tuple[Composed, list[ConfigIssue]]:
    """Compose a configuration and import its plug-ins.

    Compose again if a selected option is still not registered.

    Returns:
        The composed tree, and the problems of the plug-ins.

    Raises:
        ConfigError: The YAML files can't be composed.
    """
    _, file = split_file(overrides, config_name)
    try:
        composed, unregistered = composer.compose_before_plugins(overrides, config_name=config_name)
    except ConfigError:  # possibly because an option does not exist
        issues = _import_plugins(composer.compose(overrides, config_name=config_name).tree, file)
    else:
        issues = _import_plugins(composed.tree, file)
        if composer.are_registered(unregistered):
            return composed, issues
    return composer.compose(overrides, config_name=config_name), issues


def composer_of(config_dirs: Sequence[str | Path] = ()) -> Composer:
    """Return a composer for the user's folders and the included one, with all registries."""
    return Composer(config_dirs=config_dirs, registries=REGISTRIES)


@functools.cache
def _included_composer() -> Composer:
    """Return a composer for the included folder; cached, because its files do not change."""
    return composer_of()


def type_config(
    tree: dict[str, Any],
    problems: Sequence[ConfigIssue] = (),
    *,
    origins: Callable[[], dict[str, str]] = dict,
    searched: Collection[str] = (),
) -> RunConfig:
    """Type a tree of plain values and check the rules between its values.

    Args:
        tree: Composed tree.
        problems: Problems found so far.
        origins: Function that returns the origin of each leaf, used in messages about the user's
            files.
        searched: Keys whose rules are not checked, because a search sets the keys that they depend
            on.

    Raises:
        ConfigError: The tree is invalid; the error lists all problems.
    """
    checked = validate(tree, RunConfig)
    problems = [*problems, *checked.problems]
    reported = {*searched, *(problem.key for problem in problems)}
    problems += [rule for rule in find_rule_violations(checked.config) if rule.key not in reported]
    if problems:
        sources = origins()
        explained = (
            _with_file(_as_option_problem(problem, sources), sources) for problem in problems
        )
        # Several leftover keys of one option give the same problem.
        raise ConfigError([*{str(issue): issue for issue in explained}.values()])
    assert isinstance(checked.config, RunConfig)
    return checked.config


def _as_option_problem(problem: ConfigIssue, origins: Mapping[str, str]) -> ConfigIssue:
    """Turn a problem of a leftover key into one that says how to select the whole option.

    ``data.name=digits`` leaves the ``data.sequence_length`` of the default ``data/auto.yaml``,
    which the user did not write; ``data=digits`` replaces it.
    """
    group, _, name = problem.key.partition(".")
    name_origin = origins.get(f"{group}.name", "")
    file = Path(origins.get(problem.key, ""))
    if name == "name" or file.parent.name != group or not name_origin.startswith(OVERRIDE_ORIGIN):
        return problem
    option = name_origin.rpartition("=")[2]
    message = f"leaves the keys of {group}={file.stem} as they are; write {group}={option}"
    return ConfigIssue(f"{group}.name", message, option)


def _with_file(problem: ConfigIssue, origins: Mapping[str, str]) -> ConfigIssue:
    """Add the user's file that contains the problem to the message."""
    inside = f"{problem.key}."
    files = {o for key, o in origins.items() if key == problem.key or key.startswith(inside)}
    if not problem.key or len(files) != 1:
        return problem
    file = Path(files.pop())
    if not file.is_absolute():  # an override or an included file
        return problem
    message = f"{problem.message} (in {file})"
    if file.parent.name == problem.key:
        message += "; a file of keys of several groups begins with # @package _global_"
    return dataclasses.replace(problem, message=message)


def _import_plugins(tree: dict[str, Any], file: Path | None = None) -> list[ConfigIssue]:
    """Import the modules in ``plugins``, which register options; return the problems.

    Args:
        tree: Composed tree.
        file: The user's file with the configuration; None if there is none. A module next to it is
            found only by a command that is started in that folder.
    """
    modules = tree.get("plugins")
    modules = [modules] if isinstance(modules, str) else modules
    problems = import_plugins(modules) if isinstance(modules, list) else []
    if file is None or not file.parent.parts:
        return problems
    return [
        dataclasses.replace(problem, message=f"{problem.message}; start in its folder: cd {folder}")
        if (folder := file.parent).joinpath(f"{problem.value}.py").exists()
        else problem
        for problem in problems
    ]


def import_code(config: RunConfig) -> None:
    """Import the plug-ins of a configuration that another process has loaded.

    Raises:
        ConfigError: A module can't be imported.
    """
    if problems := import_plugins(config.plugins):
        raise ConfigError(problems)


def read_frozen(path: str | Path, *, trusted: bool = False) -> RunConfig:
    """Read a frozen configuration.

    Args:
        path: Path of a ``config.yaml`` or of a run folder.
        trusted: Whether to import modules and to insert values of environment variables that the
            file names. If false, and if another user wrote the file, modules are an error and
            variables stay ``${oc.env:NAME}``, because the author of the file could have their
            values sent to a server.

    Raises:
        ConfigError: There is no such file, it does not fit the schema of this version, or it names
            code and is not trusted.
    """
    path = Path(path) if isinstance(path, str) else path
    is_folder = path.is_dir()
    file = path / CONFIG if is_folder else path
    try:
        text = read_text(file, at_most=LARGEST_YAML)
    except (FileNotFoundError, NotADirectoryError):
        missing = (
            "no run folder (it has no config.yaml)" if is_folder else "there is no such folder"
        )
        message = f"{path}: {missing}{suggest_run_folder(path)}"
        raise ConfigError([ConfigIssue("", message)]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([ConfigIssue("", f"{file}: can't be read: {reason}")]) from None
    trusted = trusted or (isinstance(file, Path) and is_trusted(file, text))
    tree = _read_tree(text, name=str(file))
    if not trusted and (problems := foreign_code(tree, text, file=str(file))):
        raise ConfigError(problems)
    tree = _with_environment(tree, os.environ if trusted else None, name=str(file))
    return _type_frozen(tree, text)


def suggest_run_folder(path: Path) -> str:
    """Return a suggestion for a path that is only the name of a run, or one of its checkpoints."""
    local = Path(str(path))
    run = local.parents[1] if local.parent.name == "checkpoints" else Path("runs", local)
    return f"; did you mean {run}?" if (run / CONFIG).is_file() else ""


def parse_frozen(text: str, *, name: str = "the frozen configuration") -> RunConfig:
    """Parse a ``config.yaml`` that this run has frozen, and import the code that it names.

    Raises:
        ConfigError: The text does not fit the schema of this version, or names environment
            variables that are not set in this process.
    """
    tree = _with_environment(_read_tree(text, name=name), os.environ, name=name)
    return _type_frozen(tree, text)


def _type_frozen(tree: dict[str, Any], text: str) -> RunConfig:
    """Type the tree of a frozen configuration, and import the code that it names.

    Earlier versions wrote a text like 1e-3 without quotes.
    """
    issues = _import_plugins(tree)
    tree = with_number_texts(tree, lambda key, value: number_text(text, key))
    return type_config(tree, issues)


def _with_environment(
    tree: dict[str, Any], environment: Mapping[str, str] | None, *, name: str
) -> dict[str, Any]:
    """Insert the values of environment variables into a frozen configuration.

    With ``environment=None`` the names stay in the texts.

    Raises:
        ConfigError: Some variables are not set; the error names all of them.
    """
    values: dict[str, Any] = {}
    issues = []
    for key, value in tree.items():
        try:
            values[key] = resolve_variables(value, environment)
        except KeyError as error:
            message = f"{name} names the environment variable {error.args[0]}, which is not set on"
            issues.append(ConfigIssue(key, f"{message} {socket.gethostname()}; set it there too"))
    if issues:
        raise ConfigError(issues)
    return values


def _read_tree(text: str, *, name: str) -> dict[str, Any]:
    try:
        return read_yaml(text)
    except ValueError as reason:
        raise ConfigError([ConfigIssue("", f"{name}: {reason}")]) from None
