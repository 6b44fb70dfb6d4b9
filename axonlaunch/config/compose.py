"""Hydra in, plain tree out: groups, overrides, searched folders, sweeps, and who set what.

Nothing here knows the schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from axonlaunch.config.composition_errors import as_config_errors
from axonlaunch.config.did_you_mean import nearest, unknown
from axonlaunch.config.environment_values import mark_environment
from axonlaunch.config.errors import ConfigError, ConfigIssue, in_one_line
from axonlaunch.config.hydra_files import HydraFiles
from axonlaunch.config.other_names import FOREIGN_OPTIONS, UNSUPPORTED
from axonlaunch.config.override_text import (
    as_meant,
    sweep_issues,
    too_much,
    why_unread,
    without_spaces,
)
from axonlaunch.config.plain import flatten, read_yaml
from axonlaunch.config.registry import Registry
from axonlaunch.system.files import why_no_folder

OVERRIDE_ORIGIN = "override "
DEFAULT_ORIGIN = "default"

PRESET = "preset"
"""A key of the group ``model``: what its size makes sense with, by a key of ``PRESETS``. It is a
default of last resort, which our own files read by ``${oc.select:model.preset.KEY,DEFAULT}``.
"""
PRESETS = (
    "data",
    "sequence_length",
    "global_batch_size",
    "micro_batch_size",
    "precision",
    "activation_checkpointing",
)
_FROM_PRESET = re.compile(r"\$\{oc\.select:(model\.preset\.\w+),")


_CHANGED = (
    "another resolver changes the value of an environment variable, so that the value would be "
    "written to config.yaml; write ${oc.env:NAME}, with no other resolver around it"
)


@dataclass(frozen=True)
class Composed:
    """A composed configuration before it is typed.

    Attributes:
        tree: Nested plain values, interpolations resolved; texts with values of environment
            variables are ``EnvironmentText``.
        given: Dotted key of each leaf that an override set -> that override.
        in_files: The same of files; a call, since reading them all again takes as long as composing
            and few ask.
        problems: Overrides that could not be taken; the tree is composed without them.
        in_environment: Dotted key of each leaf that what started the process set -> what that was.
    """

    tree: dict[str, Any]
    given: dict[str, str]
    in_files: Callable[[], dict[str, str]]
    problems: list[ConfigIssue]
    in_environment: dict[str, str] = field(default_factory=dict)

    def origins(self) -> dict[str, str]:
        """Return what set each leaf: a file, the environment, ``"override "`` and the override."""
        overridden = {key: OVERRIDE_ORIGIN + text for key, text in self.given.items()}
        return {**self.in_files(), **overridden, **self.in_environment}


def packaged_configs() -> Path:
    """Return the folder of our own YAML: inside the installed package, else beside it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


class Composer:
    """Composes configurations from our own YAML and a user's folders, which come first."""

    def __init__(
        self,
        *,
        config_dirs: Sequence[str | Path] = (),
        registries: Mapping[str, Registry[Any, Any]] | None = None,
    ) -> None:
        """Find a user's folders; what ``registries`` list are options of their groups too."""
        self.folders = [*(Path(folder).resolve() for folder in config_dirs), packaged_configs()]
        if missing := [folder for folder in self.folders if not folder.is_dir()]:
            messages = [f"--config-dir {folder}: {why_no_folder(folder)}" for folder in missing]
            raise ConfigError([ConfigIssue("", message) for message in messages])
        self._registries = dict(registries or {})
        self._files = HydraFiles(self.folders, open_groups=self._open_groups)

    def options(self, group: str) -> dict[str, str]:
        """Return ``{option: what it is in a line}`` of a group, sorted by name.

        Options are files of YAML, and what is registered or offered by installed packages.
        """
        registry = self._registries.get(group)
        summaries = {} if registry is None else registry.summaries()
        for name in self._files.options(group):
            summaries[name] = self._summary(f"{group}/{name}.yaml")
        return dict(sorted(summaries.items()))

    def contents(self, group: str) -> dict[str, dict[str, Any]]:
        """Return ``{option: what its YAML says}`` of a group, sorted by name."""
        values: dict[str, dict[str, Any]] = {}
        for name in self._files.options(group):
            files = (folder / group / f"{name}.yaml" for folder in self.folders)
            values[name] = read_yaml(next(file for file in files if file.is_file()).read_text())
        return values

    def compose(self, overrides: Sequence[str], *, config_name: str = "config") -> Composed:
        """Compose a tree from a primary config and overrides.

        Raises:
            ConfigError: The files themselves can't be composed.
        """
        self._check_primary(config_name)
        asked, problems = self.sort_overrides(overrides, config_name)
        with as_config_errors():
            unregistered = self._unregistered_options(self._files, config_name, asked.groups)
            absent = [f"{group}/{name}" for group, name in unregistered.items()]
            files = self._files.without_optional(config_name, asked.groups, absent)
            unregistered = self._unregistered_options(files, config_name, asked.groups)
        composed = self._merge(files, config_name, asked, problems)
        for group, name in unregistered.items():
            composed.tree.pop(group, None)
            problems.append(self._unknown_option(group, name))
        return composed

    def compose_before_plugins(
        self, overrides: Sequence[str], *, config_name: str = "config"
    ) -> tuple[Composed, dict[str, str]]:
        """Compose a tree as if all options that may be registered were, since plug-ins may.

        Returns:
            What ``compose`` returns once they are registered, and ``{group: option}`` of those
            that are not registered yet.

        Raises:
            ConfigError: The files themselves can't be composed.
        """
        self._check_primary(config_name)
        asked, problems = self.sort_overrides(overrides, config_name, with_unregistered=True)
        with as_config_errors():
            unregistered = self._unregistered_options(self._files, config_name, asked.groups)
        return self._merge(self._files, config_name, asked, problems), unregistered

    def are_registered(self, options: Mapping[str, str]) -> bool:
        """Whether options that ``compose_before_plugins`` returned are registered by now."""
        return all(name in self._registries[group] for group, name in options.items())

    def _merge(
        self, files: HydraFiles, config_name: str, asked: Asked, problems: list[ConfigIssue]
    ) -> Composed:
        """Merge the chosen files and the values; add to ``problems`` what is wrong with a preset.

        Raises:
            ConfigError: The files can't be merged.
        """
        from omegaconf import OmegaConf

        with as_config_errors():
            merged = files.compose(config_name, asked.groups, asked.values)
            tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
            tree, unclear = mark_environment(tree, merged)
        assert isinstance(tree, dict)
        problems += [ConfigIssue(key, _CHANGED) for key in unclear]
        problems += _taken_preset(tree)
        in_files = partial(self._file_origins, files, config_name, asked.groups)
        named = {str(key): value for key, value in tree.items()}
        return Composed(named, asked.origins, in_files, problems)

    def sweep(self, overrides: Sequence[str]) -> list[list[str]]:
        """Expand Hydra's sweep syntax (``a=1,2``, ``range``, ``glob``) into runs, in order.

        Returns:
            The overrides of each run: ``a=1,2 b=3`` gives ``[["a=1", "b=3"], ["a=2", "b=3"]]``.

        Raises:
            ConfigError: An override is none.
        """
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        parsed, problems = self._parse(overrides)
        if problems := problems or sweep_issues(parsed):
            raise ConfigError(problems)
        batches = BasicSweeper.split_arguments(parsed, None)
        return [list(overrides) for batch in batches for overrides in batch]

    def _parse(self, overrides: Sequence[str]) -> tuple[list[Any], list[ConfigIssue]]:
        """Parse overrides, each by itself, so that every one that is wrong is reported."""
        from hydra.errors import OverrideParseException

        parsed = []
        joined, problems = without_spaces(overrides)
        for text in map(as_meant, joined):
            if reason := too_much(text):
                problems.append(ConfigIssue("", f"{text[:60]}...: {reason}"))
                continue
            try:
                override = self._files.parse(text)
            except OverrideParseException as error:
                reason = why_unread(text, str(error).splitlines()[0])
                reason = reason or f"not an override; write {self._meant(text)}"
                problems.append(ConfigIssue("", f"{in_one_line(text)}: {reason}"))
                continue
            if override.key_or_group:
                parsed.append(override)
            else:
                problems.append(ConfigIssue("", f"{text}: has no key; write key=value"))
        return parsed, problems

    def _meant(self, text: str) -> str:
        """Return what somebody may have meant by a word that is no override."""
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text):
            return f"{text}=VALUE"
        of = [group for group in self._files.groups() if text in self._files.options(group)]
        return " or ".join(f"{group}={text}" for group in of) or "key=value"

    def _check_primary(self, config_name: str) -> None:
        if not self._files.has_file(config_name):
            known = sorted(path.stem for folder in self.folders for path in folder.glob("*.yaml"))
            message = unknown("config", config_name, dict.fromkeys(known))
            raise ConfigError([ConfigIssue("", f"--config-name {config_name}: {message}")])

    def sort_overrides(
        self, overrides: Sequence[str], config_name: str, *, with_unregistered: bool = False
    ) -> tuple[Asked, list[ConfigIssue]]:
        """Sort overrides into those that choose files and those that set values.

        ``strategy=x`` and ``+strategy=x`` mean the same. A value is always added by force (``++``):
        whether its key exists is checked by the schema, for all keys at once. What is wrong with
        those that are left out is returned beside them. With ``with_unregistered``, an option that
        is not registered is one nevertheless, where plug-ins can register it.
        """
        from hydra.core.override_parser.types import OverrideType

        parsed, problems = self._parse(overrides)
        asked = Asked([], [], {})
        for override in parsed:
            text, key = override.input_line, override.key_or_group
            if key == "hydra" or key.startswith("hydra."):
                message = f"{text}: Hydra's own settings are not supported; remove it"
                problems.append(ConfigIssue("", message))
            elif override.is_sweep_override():
                message = f"{text}: several values; add -m to run them one after another"
                problems.append(ConfigIssue("", message))
            elif override.is_delete():
                (asked.groups if self._files.has_group(key) else asked.values).append(override)
            elif self._files.has_group(key):
                may_be_registered = (
                    with_unregistered
                    and key in self._open_groups
                    and isinstance(override.value(), str)
                )
                group_problems = [] if may_be_registered else self._group_problems(override)
                problems += group_problems
                if not group_problems:
                    asked.groups.extend(self._group(override, config_name))
            else:
                asked.values.append(_with_type(override, OverrideType.FORCE_ADD))
                for leaf in flatten(override.value(), key):
                    asked.origins[leaf] = text
        return asked, problems

    def _group(self, override: Any, config_name: str) -> list[Any]:
        """Return what Hydra takes for a choice of a group: it asks whether a file names it."""
        from hydra.core.override_parser.types import OverrideType

        with as_config_errors():
            named = override.key_or_group in self._files.groups_in(config_name)
        if override.value() is None:
            return [_with_type(override, OverrideType.DEL)] if named else []
        return [_with_type(override, OverrideType.CHANGE if named else OverrideType.ADD)]

    def _group_problems(self, override: Any) -> list[ConfigIssue]:
        group, value = override.key_or_group, override.value()
        if value is None or self._is_option(group, str(value)):
            return []
        if message := UNSUPPORTED.get(f"{group}={value}".lower()):
            return [ConfigIssue(group, message, value)]
        if isinstance(value, list):
            several = ",".join(str(option) for option in value)
            message = f"it takes one option; to run several in turn write -m {group}={several}"
            return [ConfigIssue(group, message, value)]
        return [self._unknown_option(group, value)]

    @property
    def _open_groups(self) -> frozenset[str]:
        """The groups whose options can be registered."""
        return frozenset(k for k, known in self._registries.items() if known.entry_points)

    def _is_option(self, group: str, name: str) -> bool:
        registry = self._registries.get(group)
        return name in self._files.options(group) or (registry is not None and name in registry)

    def _unknown_option(self, group: str, value: Any) -> ConfigIssue:
        registry = self._registries.get(group)
        options = sorted({*self._files.options(group), *(registry.names() if registry else ())})
        close = FOREIGN_OPTIONS.get(f"{group}={value}".lower()) or nearest(str(value), options)
        meant = f"did you mean {close}? " if close else ""
        own = "; plugins=[module] registers your own" if group in self._open_groups else ""
        message = f"there is no such option; {meant}known: {', '.join(options)}{own}"
        return ConfigIssue(group, message, value)

    def _unregistered_options(
        self, files: HydraFiles, config_name: str, groups: Sequence[Any]
    ) -> dict[str, str]:
        """Return ``{group: option}`` of what files name, and nobody has a file for or registers."""
        named = files.without_file(config_name, groups)
        return {k: name for k, name in named.items() if name not in self._registries[k]}

    def _file_origins(
        self, files: HydraFiles, config_name: str, groups: Sequence[Any]
    ) -> dict[str, str]:
        from omegaconf import OmegaConf

        origins: dict[str, str] = {}
        sources: dict[str, str] = {}
        for default in files.chosen(config_name, groups):
            if default.config_path.startswith("hydra/"):
                continue
            content = files.content(config_name, default)
            tree = OmegaConf.to_container(content, resolve=False)
            where = self._describe(default.config_path)
            for leaf, value in flatten(tree, "").items():
                origins[leaf] = where
                reference = _FROM_PRESET.match(str(value))
                sources[leaf] = reference[1] if reference else leaf
        return {leaf: origins.get(sources[leaf], where) for leaf, where in origins.items()}

    def _describe(self, config_path: str) -> str:
        """Name a file: from our own folder by its place in it, a user's by its whole path."""
        name = f"{config_path}.yaml"
        for base in self.folders:
            candidate = base / name
            if candidate.is_file():
                return name if base == packaged_configs() else str(candidate)
        return f"{config_path}, registered"

    def _summary(self, relative: str) -> str:
        for folder in self.folders:
            path = folder / relative
            if path.is_file():
                lines = path.read_text().splitlines() or [""]
                comments = [line for line in lines[:2] if not line.startswith("# @package")]
                first = comments[0] if comments else ""
                return first.lstrip("# ") if first.startswith("#") else ""
        return ""


@dataclass(frozen=True)
class Asked:
    """Overrides as Hydra takes them.

    Attributes:
        groups: Those that choose files.
        values: Those that set values or remove them, in order.
        origins: Dotted key of each leaf that one sets -> the override as it was written.
    """

    groups: list[Any]
    values: list[Any]
    origins: dict[str, str]


def _with_type(override: Any, kind: Any) -> Any:
    """Return a parsed override as if it had been written with another prefix: ``+``, ``~``."""
    text = override.input_line.lstrip("+")
    prefix = {"ADD": "+", "FORCE_ADD": "++", "DEL": "~"}.get(kind.name, "")
    return replace(override, type=kind, input_line=prefix + text)


def _taken_preset(tree: dict[Any, Any]) -> list[ConfigIssue]:
    """Take a model's preset out of a composed tree, where it has had its effect."""
    model = tree.get("model")
    preset = model.pop(PRESET, None) if isinstance(model, dict) else None
    key = f"model.{PRESET}"
    if preset is None:
        return []
    if not isinstance(preset, dict):
        return [ConfigIssue(key, f"expected keys of it: {', '.join(PRESETS)}", preset)]
    known = dict.fromkeys(PRESETS)
    return [
        ConfigIssue(f"{key}.{name}", unknown("key", str(name), known), value)
        for name, value in preset.items()
        if name not in known
    ]
