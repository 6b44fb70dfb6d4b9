"""A run's configuration: composed by Hydra, typed by dataclasses, checked as a whole.

``load`` is the only way in; below it there is no DictConfig.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonlaunch.config.compose import DEFAULT_ORIGIN, Composed, Composer
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import MODEL_CONFIGS
from axonlaunch.config.plain import LARGEST_YAML, flatten, read_yaml, to_tree, to_yaml, with_values
from axonlaunch.config.plugins import import_entry_point, import_plugins, search_here
from axonlaunch.config.rules import find_rule_violations
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.trust import foreign_code
from axonlaunch.config.validate import validate
from axonlaunch.system.files import read_text

__all__ = [
    "CONFIG",
    "DEFAULT_ORIGIN",
    "Composed",
    "Composer",
    "ConfigError",
    "ConfigIssue",
    "RunConfig",
    "compose",
    "flatten",
    "import_code",
    "load",
    "meant_below_runs",
    "parsed",
    "read",
    "with_values",
    "to_tree",
    "to_yaml",
    "typed",
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
    return typed(composed.tree, composed.problems, origins=composed.origins)


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[str | Path] = (),
) -> Composed:
    """Compose a configuration without typing it, for who asks where its values come from.

    Raises:
        ConfigError: The files themselves can't be composed.
    """
    composer = Composer(config_dirs=config_dirs) if config_dirs else _of_ours()
    composed = composer.compose(overrides, config_name=config_name)
    problems = _import_models(composed.tree) + composed.problems
    return _with_registered_model(dataclasses.replace(composed, problems=problems))


@functools.cache
def _of_ours() -> Composer:
    """Return what composes from our own YAML alone, which does not change."""
    return Composer()


def typed(
    tree: dict[str, Any],
    problems: Sequence[ConfigIssue] = (),
    *,
    origins: Callable[[], dict[str, str]] = dict,
) -> RunConfig:
    """Type a tree of plain values and check the rules between them.

    Args:
        tree: As composed.
        problems: What is already known to be wrong with it.
        origins: What set each leaf, for who asks which of a user's files is wrong.

    Raises:
        ConfigError: Everything that is wrong, all at once.
    """
    checked = validate(tree, RunConfig)
    problems = [*problems, *checked.problems]
    reported = {problem.key for problem in problems}
    problems += [rule for rule in find_rule_violations(checked.config) if rule.key not in reported]
    if problems:
        sources = origins()
        raise ConfigError([_placed(problem, sources) for problem in problems])
    assert isinstance(checked.config, RunConfig)
    return checked.config


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


def _import_models(tree: dict[str, Any]) -> list[ConfigIssue]:
    """Import what registers models: plugins, and the package that offers the chosen model."""
    modules, model = tree.get("plugins"), tree.get("model")
    problems = import_plugins(modules) if isinstance(modules, list) else []
    if isinstance(model, dict):
        problems += import_entry_point(str(model.get("name")), MODEL_CONFIGS)
        if model.get("name") == "custom":
            search_here()  # for model.target
    return problems


def import_code(config: RunConfig) -> None:
    """Import what a configuration names, in a process that received it as a value.

    Raises:
        ConfigError: A module can't be imported.
    """
    named = {"plugins": config.plugins, "model": {"name": config.model.name}}
    if problems := _import_models(named):
        raise ConfigError(problems)


def _with_registered_model(composed: Composed) -> Composed:
    """Let ``model=NAME`` choose a model that a plugin registered, for which there is no YAML.

    Its group then holds the name and what overrides set, nothing of the default model's.
    """
    for problem in composed.problems:
        if problem.key != "model":
            continue
        name = str(problem.value)
        import_entry_point(name, MODEL_CONFIGS)
        if name not in MODEL_CONFIGS:
            continue
        group = composed.tree.get("model", {})
        given = {key.split(".")[1] for key in composed.given if key.startswith("model.")}
        chosen = {"name": name, **{key: group[key] for key in sorted(given)}}
        return dataclasses.replace(
            composed,
            tree={**composed.tree, "model": chosen},
            given={**composed.given, "model.name": f"model={name}"},
            problems=[other for other in composed.problems if other is not problem],
        )
    return composed


def read(path: str | Path, *, trusted: bool = False) -> RunConfig:
    """Read a frozen ``config.yaml``, or that of a run folder.

    Args:
        path: The file or the folder.
        trusted: Import the modules that it names; they are refused otherwise.

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
    return typed(tree, _import_models(tree))


def meant_below_runs(path: Path) -> str:
    """Return the question for a run that was given by its name alone; empty for other paths."""
    run = Path("runs", str(path))
    return f"; did you mean {run}?" if (run / CONFIG).is_file() else ""


def parsed(text: str, *, name: str = "the frozen configuration") -> RunConfig:
    """Read the text of a ``config.yaml`` that this very run has frozen, and import what it names.

    Raises:
        ConfigError: It does not fit this version's schema.
    """
    tree = _read_tree(text, name=name)
    return typed(tree, _import_models(tree))


def _read_tree(text: str, *, name: str) -> dict[str, Any]:
    try:
        return read_yaml(text)
    except ValueError as reason:
        raise ConfigError([ConfigIssue("", f"{name}: {reason}")]) from None
