"""A run's configuration: composed by Hydra, typed by dataclasses, checked as a whole.

``load`` is the only way in; below it there is no DictConfig.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonlaunch.config.compose import OVERRIDE_ORIGIN, Composed, Composer
from axonlaunch.config.environment_values import resolve_variables, to_interpolations
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.plain import LARGEST_YAML, flatten, read_yaml, to_tree, to_yaml, with_values
from axonlaunch.config.plugins import import_plugins
from axonlaunch.config.rules import find_rule_violations
from axonlaunch.config.schema import REGISTRIES, RunConfig
from axonlaunch.config.trust import foreign_code
from axonlaunch.config.validate import validate
from axonlaunch.system.files import read_text

__all__ = [
    "CONFIG",
    "Composed",
    "Composer",
    "ConfigError",
    "ConfigIssue",
    "RunConfig",
    "to_interpolations",
    "compose",
    "composer_of",
    "flatten",
    "import_code",
    "load",
    "meant_below_runs",
    "parse_frozen",
    "read",
    "with_values",
    "to_tree",
    "to_yaml",
    "type_config",
]


CONFIG = "config.yaml"
"""A run's frozen configuration, in its folder."""


def load(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[str | Path] = (),
) -> RunConfig:
    """Compose, type and check a configuration.

    Args:
        overrides: Hydra overrides, ``["strategy=fsdp", "train.steps=10"]``.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML, searched before ours.

    Raises:
        ConfigError: Everything that is wrong and can be detected without torch, all at once.
    """
    composed = compose(overrides, config_name=config_name, config_dirs=config_dirs)
    return type_config(composed.tree, composed.problems, origins=composed.origins)


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[str | Path] = (),
) -> Composed:
    """Compose a configuration without typing it, for who asks where its values come from.

    Args:
        overrides: As ``load`` takes them.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML, searched before ours.

    Returns:
        The tree with what set each value; what is wrong with single overrides is in ``problems``.

    Raises:
        ConfigError: The files themselves can't be composed.
    """
    composer = composer_of(config_dirs) if config_dirs else _of_ours()
    composed, issues = _compose_with_plugins(composer, overrides, config_name)
    return _replaced(dataclasses.replace(composed, problems=issues + composed.problems))


def _compose_with_plugins(
    composer: Composer, overrides: Sequence[str], config_name: str
) -> tuple[Composed, list[ConfigIssue]]:
    """Compose, and import the plug-ins; compose again only if an option is registered by none.

    Returns:
        What was composed, and what is wrong with the plug-ins.

    Raises:
        ConfigError: The files themselves can't be composed.
    """
    try:
        composed, awaited = composer.compose_before_plugins(overrides, config_name=config_name)
    except ConfigError:  # perhaps because of an option that does not exist
        issues = _import_plugins(composer.compose(overrides, config_name=config_name).tree)
    else:
        issues = _import_plugins(composed.tree)
        if composer.are_registered(awaited):
            return composed, issues
    return composer.compose(overrides, config_name=config_name), issues


def _replaced(composed: Composed) -> Composed:
    """Let a key take the place of another one that nobody has set.

    ``train.epochs`` that of the packaged number of steps, ``data.mix`` that of files.
    """
    tree = dict(composed.tree)
    data, train = tree.get("data"), tree.get("train")
    if isinstance(data, dict) and data.get("mix") and data.get("files") == "???":
        tree["data"] = {**data, "files": []}
    has_epochs = isinstance(train, dict) and train.get("epochs") is not None
    if has_epochs and composed.origins().get("train.steps") == CONFIG:
        tree["train"] = {**tree["train"], "steps": "auto"}
    return dataclasses.replace(composed, tree=tree)


def composer_of(config_dirs: Sequence[str | Path] = ()) -> Composer:
    """Return what composes from a user's folders and ours, and knows what is registered."""
    return Composer(config_dirs=config_dirs, registries=REGISTRIES)


@functools.cache
def _of_ours() -> Composer:
    """Return what composes from our own YAML alone, which does not change."""
    return composer_of()


def type_config(
    tree: dict[str, Any],
    problems: Sequence[ConfigIssue] = (),
    *,
    origins: Callable[[], dict[str, str]] = dict,
    searched: Collection[str] = (),
) -> RunConfig:
    """Type a tree of plain values and check the rules between them.

    Args:
        tree: As composed.
        problems: What is already known to be wrong with it.
        origins: What set each leaf, for who asks which of a user's files is wrong.
        searched: Keys that break no rule yet: those that they have to go with are searched.

    Raises:
        ConfigError: Everything that is wrong, all at once.
    """
    checked = validate(tree, RunConfig)
    problems = [*problems, *checked.problems]
    reported = {*searched, *(problem.key for problem in problems)}
    problems += [rule for rule in find_rule_violations(checked.config) if rule.key not in reported]
    if problems:
        sources = origins()
        placed = (_placed(_chosen(problem, sources), sources) for problem in problems)
        # Of keys that another option left, each has the same one.
        raise ConfigError([*{str(issue): issue for issue in placed}.values()])
    assert isinstance(checked.config, RunConfig)
    return checked.config


def _chosen(problem: ConfigIssue, origins: Mapping[str, str]) -> ConfigIssue:
    """Say of a key left by another option how that option is replaced as a whole.

    ``scheduler.name=constant`` leaves ``scheduler.final_lr_ratio`` of the default
    ``scheduler/cosine.yaml``, which nobody wrote; ``scheduler=constant`` is meant.
    """
    group, _, name = problem.key.partition(".")
    by = origins.get(f"{group}.name", "")
    file = Path(origins.get(problem.key, ""))
    if name == "name" or file.parent.name != group or not by.startswith(OVERRIDE_ORIGIN):
        return problem
    option = by.rpartition("=")[2]
    message = f"leaves the keys of {group}={file.stem} as they are; write {group}={option}"
    return ConfigIssue(f"{group}.name", message, option)


def _placed(problem: ConfigIssue, origins: Mapping[str, str]) -> ConfigIssue:
    """Say in which of a user's own files a problem is."""
    inside = f"{problem.key}."
    files = {o for key, o in origins.items() if key == problem.key or key.startswith(inside)}
    if not problem.key or len(files) != 1:
        return problem
    file = Path(files.pop())
    if not file.is_absolute():  # an override, or one of ours
        return problem
    message = f"{problem.message} (in {file})"
    if file.parent.name == problem.key:
        message += "; a file of keys of several groups begins with # @package _global_"
    return dataclasses.replace(problem, message=message)


def _import_plugins(tree: dict[str, Any]) -> list[ConfigIssue]:
    """Import the modules that register what the configuration may choose."""
    modules = tree.get("plugins")
    return import_plugins(modules) if isinstance(modules, list) else []


def import_code(config: RunConfig) -> None:
    """Import the plugins of a configuration, in a process that received it as a value.

    Raises:
        ConfigError: A module can't be imported.
    """
    if problems := import_plugins(config.plugins):
        raise ConfigError(problems)


def read_frozen(path: str | Path, *, trusted: bool = False) -> RunConfig:
    """Read a frozen ``config.yaml``, or that of a run folder.

    Args:
        path: The file or the folder.
        trusted: Import the modules that it names, which are refused otherwise, and put in the
            values of the environment variables that it names, which otherwise stay
            ``${oc.env:NAME}``: its author could have them sent to a server.

    Raises:
        ConfigError: There is no such file, it does not fit this version's schema, or names code.
    """
    path = Path(path) if isinstance(path, str) else path
    file = path / CONFIG if path.is_dir() else path
    try:
        text = read_text(file, at_most=LARGEST_YAML)
    except (FileNotFoundError, NotADirectoryError):
        message = f"{path}: no run folder (it has no config.yaml){meant_below_runs(path)}"
        raise ConfigError([ConfigIssue("", message)]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([ConfigIssue("", f"{file}: can't be read: {reason}")]) from None
    tree = _read_tree(text, name=str(file))
    if not trusted and (problems := foreign_code(tree, text, file=str(file))):
        raise ConfigError(problems)
    tree = _with_environment(tree, os.environ if trusted else None, name=str(file))
    return type_config(tree, _import_plugins(tree))


def meant_below_runs(path: Path) -> str:
    """Return the question for a run that was given by its name alone; empty for other paths."""
    run = Path("runs", str(path))
    return f"; did you mean {run}?" if (run / CONFIG).is_file() else ""


def parse_frozen(text: str, *, name: str = "the frozen configuration") -> RunConfig:
    """Read the text of a ``config.yaml`` that this very run has frozen, and import what it names.

    Raises:
        ConfigError: It does not fit this version's schema, or names environment variables that this
            process does not have.
    """
    tree = _with_environment(_read_tree(text, name=name), os.environ, name=name)
    return type_config(tree, _import_plugins(tree))


def _with_environment(
    tree: dict[str, Any], environment: Mapping[str, str] | None, *, name: str
) -> dict[str, Any]:
    """Put the values of environment variables into a frozen configuration; None: their names.

    Raises:
        ConfigError: Some are not set here; all of them are named.
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
