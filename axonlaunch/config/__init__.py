"""A run's configuration: composed by Hydra, typed by dataclasses, checked as a whole.

``load`` is the only way in; below it there is no DictConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from axonlaunch.config.compose import DEFAULT_ORIGIN, OVERRIDE_ORIGIN, Composed, Composer
from axonlaunch.config.model import MODEL_CONFIGS
from axonlaunch.config.plugins import import_entry_point, import_plugins, search_here
from axonlaunch.config.problem import ConfigError, Problem
from axonlaunch.config.rules import broken_rules
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.tree import leaves, read_yaml, to_tree, to_yaml
from axonlaunch.config.validate import validate

__all__ = [
    "DEFAULT_ORIGIN",
    "Composed",
    "Composer",
    "ConfigError",
    "Problem",
    "RunConfig",
    "compose",
    "leaves",
    "load",
    "read",
    "to_tree",
    "to_yaml",
    "typed",
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
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML, searched before ours.

    Raises:
        ConfigError: Everything that is wrong and can be told without torch, all at once.
    """
    return typed(compose(overrides, config_name=config_name, config_dirs=config_dirs))


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
    composer = Composer(config_dirs=config_dirs)
    return _with_plugins(composer.compose(overrides, config_name=config_name))


def typed(composed: Composed) -> RunConfig:
    """Type a composed tree and check the rules between its values.

    Raises:
        ConfigError: Everything that is wrong, all at once.
    """
    problems = list(composed.problems)
    checked = validate(composed.tree, RunConfig)
    problems += checked.problems
    told = {problem.key for problem in problems}
    problems += [rule for rule in broken_rules(checked.config) if rule.key not in told]
    if problems:
        raise ConfigError(problems)
    assert isinstance(checked.config, RunConfig)
    return checked.config


def _with_plugins(composed: Composed) -> Composed:
    """Import what registers models: plugins, and the package that offers the chosen model."""
    modules, model = composed.tree.get("plugins"), composed.tree.get("model")
    problems = import_plugins(modules) if isinstance(modules, list) else []
    if isinstance(model, dict):
        problems += import_entry_point(str(model.get("name")), MODEL_CONFIGS)
        if model.get("name") == "custom":
            search_here()  # for model.target
    composed = dataclasses.replace(composed, problems=problems + composed.problems)
    return _with_registered_model(composed)


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
        given = {
            key.split(".")[1]
            for key, origin in composed.origins.items()
            if key.startswith("model.") and origin.startswith(OVERRIDE_ORIGIN)
        }
        chosen = {"name": name, **{key: group[key] for key in sorted(given)}}
        return Composed(
            {**composed.tree, "model": chosen},
            {**composed.origins, "model.name": f"{OVERRIDE_ORIGIN}model={name}"},
            [other for other in composed.problems if other is not problem],
        )
    return composed


def read(path: str | Path) -> RunConfig:
    """Read a frozen ``config.yaml``, or that of a run folder.

    Raises:
        ConfigError: There is no such file, or it does not fit this version's schema.
    """
    path = Path(path)
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError([Problem("", f"{path}: no run folder (it has no config.yaml)")])
    try:
        tree = read_yaml(file)
    except ValueError as reason:
        raise ConfigError([Problem("", f"{file}: {reason}")]) from None
    return typed(_with_plugins(Composed(tree, {}, [])))
