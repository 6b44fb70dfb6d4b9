"""Composes YAML files and overrides by Hydra to a plain tree that knows the origin of each value.

This module does not know the schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from axonlaunch.config.composition.composition_errors import as_config_errors
from axonlaunch.config.composition.hydra_files import HydraFiles
from axonlaunch.config.composition.other_name import use_other_name
from axonlaunch.config.composition.override_text import (
    as_meant,
    number_in_override,
    several_values,
    sweep_issues,
    too_much,
    why_unread,
    without_spaces,
)
from axonlaunch.config.composition.random_search import interval_problems, random_runs
from axonlaunch.config.composition.user_file import (
    errors_of_file,
    is_file,
    read_user_file,
    split_file,
)
from axonlaunch.config.problems.did_you_mean import nearest, unknown
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, in_one_line
from axonlaunch.config.problems.other_names import FOREIGN_OPTIONS
from axonlaunch.config.registry import Registry
from axonlaunch.config.values.environment_values import mark_environment
from axonlaunch.config.values.plain_values import LARGEST_YAML, flatten, number_text, read_yaml
from axonlaunch.system.storage.files import read_text, why_no_folder

OVERRIDE_ORIGIN = "override "
DEFAULT_ORIGIN = "default"

PRESET = "preset"
"""Key of the group ``model`` with settings that suit its size, by the keys of ``PRESETS``.

They have the lowest priority. Included files read them by
``${oc.select:model.preset.KEY,DEFAULT}``.
"""
PRESETS = (
    "data",
    "sequence_length",
    "global_batch_size",
    "micro_batch_size",
    "precision",
    "activation_checkpointing",
    "lr",
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
        tree: Nested plain values with resolved interpolations; texts with values of environment
            variables are ``EnvironmentText``.
        overridden: Maps the dotted key of each leaf that an override set to that override.
        in_files: Function that maps the dotted key of each leaf in a file to that file. It reads
            all files again, which takes as long as composing, so it is called only if needed.
        problems: Problems of overrides; the tree is composed without these overrides.
        in_environment: Maps the dotted key of each leaf that the starter of this process set, such
            as torchrun, to a text with its name.
        preset: Preset of the model, by the keys of ``PRESETS``.
        chosen: Maps the dotted key of each leaf that was chosen by what the run trains to a text
            with the reason.
        primary: Primary file as ``in_files`` names it.
        config_dirs: Folders with the user's YAML files.
    """

    tree: dict[str, Any]
    overridden: dict[str, str]
    in_files: Callable[[], dict[str, str]]
    problems: list[ConfigIssue]
    in_environment: dict[str, str] = field(default_factory=dict)
    preset: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    primary: str = ""
    config_dirs: Sequence[Path] = ()

    def is_of_run(self, file: str) -> bool:
        """Return whether a file of ``in_files`` is an experiment or the user's primary file."""
        if not Path(file).is_absolute():
            return file.startswith("experiment/")
        folders = (folder / "experiment" for folder in self.config_dirs)
        return file == self.primary or any(Path(file).is_relative_to(each) for each in folders)

    def origins(self) -> dict[str, str]:
        """Return the origin of each leaf: a file, the environment, or ``"override TEXT"``."""
        overridden = {key: OVERRIDE_ORIGIN + text for key, text in self.overridden.items()}
        return {**self.in_files(), **overridden, **self.in_environment, **self.chosen}

    def number_text(self, key: str, value: float) -> str | None:
        """Return how the user wrote a float, ``1e-3``; None if this is unknown.

        Args:
            key: Dotted key ``a.b[0].c``.
            value: Composed value of the key.
        """
        leaf = key.partition("[")[0]
        if leaf in self.overridden:
            return number_in_override(self.overridden[leaf], value)
        file = Path(self.in_files().get(leaf, ""))
        if not file.is_absolute():
            return None
        text = read_text(file, at_most=LARGEST_YAML)
        in_group = key.partition(".")[2]  # a file of a group has the keys below the group
        return number_text(text, key) or number_text(text, in_group)


def packaged_configs() -> Path:
    """Return the folder of included YAML: in the installed package, else next to its source."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


class Composer:
    """Composes configurations from the user's folders, which have priority, and included YAML."""

    def __init__(
        self,
        *,
        config_dirs: Sequence[str | Path] = (),
        registries: Mapping[str, Registry[Any, Any]] | None = None,
    ) -> None:
        """Find the folders; entries of ``registries`` are options of their groups too."""
        self.folders = [*(Path(folder).resolve() for folder in config_dirs), packaged_configs()]
        if missing := [folder for folder in self.folders if not folder.is_dir()]:
            messages = [f"--config-dir {folder}: {why_no_folder(folder)}" for folder in missing]
            raise ConfigError([ConfigIssue("", message) for message in messages])
        self._registries = dict(registries or {})
        self._files = HydraFiles(self.folders, open_groups=self._open_groups)

    def groups(self) -> list[str]:
        """Return the groups of the included primary config, sorted."""
        return sorted(self._files.groups_in("config"))

    def options(self, group: str) -> dict[str, str]:
        """Return ``{option: summary line}`` of a group, sorted by name.

        Options are YAML files, registered entries, and entry points of installed packages.
        """
        registry = self._registries.get(group)
        summaries = {} if registry is None else registry.summaries()
        for name in self._files.options(group):
            summaries[name] = self._summary(f"{group}/{name}.yaml")
        return dict(sorted(summaries.items()))

    def contents(self, group: str) -> dict[str, dict[str, Any]]:
        """Return ``{option: keys of its YAML}`` of a group, sorted by name.

        Raises:
            ConfigError: A file can't be read, or is no mapping.
        """
        values: dict[str, dict[str, Any]] = {}
        for name in self._files.options(group):
            files = (folder / group / f"{name}.yaml" for folder in self.folders)
            file = next(file for file in files if file.is_file())
            with errors_of_file(file):
                values[name] = read_yaml(read_text(file, at_most=LARGEST_YAML))
        return values

    def compose(self, overrides: Sequence[str], *, config_name: str = "config") -> Composed:
        """Compose a tree from a primary config and overrides.

        Raises:
            ConfigError: The YAML files can't be composed.
        """
        overrides, config_name = self._with_user_file(overrides, config_name)
        override_lists, problems = self.sort_overrides(overrides, config_name)
        groups = override_lists.groups
        with as_config_errors():
            unregistered = self._unregistered_options(self._files, config_name, groups)
            absent = [f"{group}/{name}" for group, name in unregistered.items()]
            files = self._files.without_optional(config_name, groups, absent)
            unregistered = self._unregistered_options(files, config_name, groups)
        composed = self._compose_files(files, config_name, override_lists, problems)
        for group, name in unregistered.items():
            composed.tree.pop(group, None)
            problems.append(self._unknown_option(group, name))
        return composed

    def compose_before_plugins(
        self, overrides: Sequence[str], *, config_name: str = "config"
    ) -> tuple[Composed, dict[str, str]]:
        """Compose a tree before plug-ins are imported, which may register some of its options.

        Returns:
            The result of ``compose`` after these options are registered, and ``{group: option}`` of
            options that are not registered yet.

        Raises:
            ConfigError: The YAML files can't be composed.
        """
        overrides, config_name = self._with_user_file(overrides, config_name)
        override_lists, problems = self.sort_overrides(
            overrides, config_name, with_unregistered=True
        )
        groups = override_lists.groups
        with as_config_errors():
            unregistered = self._unregistered_options(self._files, config_name, groups)
        composed = self._compose_files(self._files, config_name, override_lists, problems)
        return composed, unregistered

    def are_registered(self, options: Mapping[str, str]) -> bool:
        """Return whether options from ``compose_before_plugins`` are registered now."""
        return all(name in self._registries[group] for group, name in options.items())

    def _compose_files(
        self,
        files: HydraFiles,
        config_name: str,
        overrides: SortedOverrides,
        problems: list[ConfigIssue],
    ) -> Composed:
        """Merge the selected files and the values; add problems of a preset to ``problems``.

        Raises:
            ConfigError: The files can't be merged.
        """
        from omegaconf import OmegaConf

        with as_config_errors():
            merged = files.compose(config_name, overrides.groups, overrides.values)
            tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
            tree, changed = mark_environment(tree, merged)
        assert isinstance(tree, dict)
        problems += [ConfigIssue(key, _CHANGED) for key in changed]
        preset, preset_problems = _remove_preset(tree)
        problems += preset_problems
        file_origins = cache(partial(self._file_origins, files, config_name, overrides.groups))
        named = {str(key): value for key, value in tree.items()}
        origins = overrides.origins
        if "name" in origins:
            unnamed = [o for o in overrides.values if o.key_or_group != "name"]
            in_files = files.compose(config_name, overrides.groups, unnamed)
            for key in use_other_name(named, in_files, given=origins.keys()):
                origins[key] = origins["name"]
        return Composed(
            named,
            origins,
            file_origins,
            problems,
            preset=preset,
            primary=self._describe(config_name),
            config_dirs=self.folders[:-1],
        )

    def sweep(self, overrides: Sequence[str], *, samples: int | None = None) -> list[list[str]]:
        """Expand Hydra's sweep syntax (``a=1,2``, ``range``, ``glob``) into runs, in order.

        Args:
            overrides: Hydra overrides.
            samples: Number of runs that are drawn at random, also from ``interval``; None for every
                combination.

        Returns:
            The overrides of each run: ``a=1,2 b=3`` gives ``[["a=1", "b=3"], ["a=2", "b=3"]]``.

        Raises:
            ConfigError: An override is invalid.
        """
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        rest, file = split_file(overrides, "")
        parsed, problems = self._parse(rest)
        common = [] if file is None else [str(file)]
        if samples is not None:
            problems += [ConfigIssue("", text) for text in interval_problems(parsed)]
            if not any(override.is_sweep_override() for override in parsed):
                message = (
                    "--samples: no key has several values, so all runs would be equal; "
                    "write for example optimizer.lr=tag(log,interval(1e-5,1e-3))"
                )
                problems.append(ConfigIssue("", message))
            if problems:
                raise ConfigError(problems)
            return [[*common, *run] for run in random_runs(parsed, samples)]
        if problems := problems or sweep_issues(parsed):
            raise ConfigError(problems)
        batches = BasicSweeper.split_arguments(parsed, None)
        return [[*common, *overrides] for batch in batches for overrides in batch]

    def _parse(self, overrides: Sequence[str]) -> tuple[list[Any], list[ConfigIssue]]:
        """Parse each override separately, so that all invalid ones are reported."""
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
                reason = reason or f"not an override; write {self._suggest(text)}"
                problems.append(ConfigIssue("", f"{in_one_line(text)}: {reason}"))
                continue
            if override.key_or_group:
                parsed.append(override)
            else:
                problems.append(ConfigIssue("", f"{text}: has no key; write key=value"))
        return parsed, problems

    def _suggest(self, text: str) -> str:
        """Return the override that a word without ``=`` probably means."""
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text):
            return f"{text}=VALUE"
        groups = [group for group in self._files.groups() if text in self._files.options(group)]
        return " or ".join(f"{group}={text}" for group in groups) or "key=value"

    def _with_user_file(self, overrides: Sequence[str], config_name: str) -> tuple[list[str], str]:
        """Return the overrides without a file, and the name of the primary config.

        Raises:
            ConfigError: The file can't be read, or there is no such primary config.
        """
        rest, path = split_file(overrides, config_name)
        if path is not None:
            file = read_user_file(path, self._files.groups_in("config"))
            self._files.add_primary(file)
            return rest, file.name
        self._check_primary(config_name)
        return rest, config_name

    def _check_primary(self, config_name: str) -> None:
        if not self._files.has_file(config_name):
            config_names = sorted(
                path.stem for folder in self.folders for path in folder.glob("*.yaml")
            )
            message = unknown("config", config_name, dict.fromkeys(config_names))
            raise ConfigError([ConfigIssue("", f"--config-name {config_name}: {message}")])

    def sort_overrides(
        self, overrides: Sequence[str], config_name: str, *, with_unregistered: bool = False
    ) -> tuple[SortedOverrides, list[ConfigIssue]]:
        """Separate overrides that select files from overrides that set values.

        ``strategy=x`` and ``+strategy=x`` mean the same. Values are always added by force (``++``),
        because the schema checks later whether their keys exist, for all keys at once. Invalid
        overrides are left out, and their problems are returned.

        Args:
            overrides: Hydra overrides.
            config_name: Name of the primary config.
            with_unregistered: Whether to accept options that a plug-in may register.
        """
        from hydra.core.override_parser.types import OverrideType

        parsed, problems = self._parse(overrides)
        result = SortedOverrides([], [], {})
        for override in parsed:
            text, key = override.input_line, override.key_or_group
            if key == "hydra" or key.startswith(("hydra.", "hydra/")):
                message = f"{text}: Hydra's own settings are not supported; remove it"
                problems.append(ConfigIssue("", message))
            elif override.is_sweep_override():
                reason = several_values(text, is_group=self._files.has_group(key))
                problems.append(ConfigIssue("", f"{text}: {reason}"))
            elif override.is_delete():
                (result.groups if self._files.has_group(key) else result.values).append(override)
            elif self._files.has_group(key):
                may_be_registered = (
                    with_unregistered
                    and key in self._open_groups
                    and isinstance(override.value(), str)
                )
                group_problems = [] if may_be_registered else self._group_problems(override)
                problems += group_problems
                if not group_problems:
                    result.groups.extend(self._group(override, config_name))
            else:
                result.values.append(_with_type(override, OverrideType.FORCE_ADD))
                for leaf in flatten(override.value(), key):
                    result.origins[leaf] = text
        return result, problems

    def _group(self, override: Any, config_name: str) -> list[Any]:
        """Return a group override with the prefix that Hydra requires for the primary config."""
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
        if isinstance(value, list):
            several = ",".join(str(option) for option in value)
            message = f"it takes one option; to run several in turn write -m {group}={several}"
            return [ConfigIssue(group, message, value)]
        return [self._unknown_option(group, value)]

    @property
    def _open_groups(self) -> frozenset[str]:
        """Groups with options that can be registered."""
        return frozenset(k for k, registry in self._registries.items() if registry.entry_points)

    def _is_option(self, group: str, name: str) -> bool:
        registry = self._registries.get(group)
        return name in self._files.options(group) or (registry is not None and name in registry)

    def _unknown_option(self, group: str, value: Any) -> ConfigIssue:
        registry = self._registries.get(group)
        options = sorted({*self._files.options(group), *(registry.names() if registry else ())})
        close = FOREIGN_OPTIONS.get(f"{group}={value}".lower()) or nearest(str(value), options)
        meant = f"did you mean {close}? " if close else ""
        hint = "; plugins=[module] registers a custom one" if group in self._open_groups else ""
        hint = f"; a file is given without {group}=" if is_file(str(value)) else hint
        message = f"there is no such option; {meant}known: {', '.join(options)}{hint}"
        return ConfigIssue(group, message, value)

    def _unregistered_options(
        self, files: HydraFiles, config_name: str, groups: Sequence[Any]
    ) -> dict[str, str]:
        """Return ``{group: option}`` of selected options without a file or a registered entry."""
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
            file = self._describe(default.config_path)
            for leaf, value in flatten(tree, "").items():
                origins[leaf] = file
                reference = _FROM_PRESET.match(str(value))
                sources[leaf] = reference[1] if reference else leaf
        return {leaf: origins.get(sources[leaf], file) for leaf, file in origins.items()}

    def _describe(self, config_path: str) -> str:
        """Return the relative name of an included file, or the full path of a user's file."""
        if (path := self._files.path_of_primary(config_path)) is not None:
            return str(path)
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
                lines = read_text(path, at_most=LARGEST_YAML).splitlines() or [""]
                comments = [line for line in lines[:2] if not line.startswith("# @package")]
                first = comments[0] if comments else ""
                return first.lstrip("# ") if first.startswith("#") else ""
        return ""


@dataclass(frozen=True)
class SortedOverrides:
    """Parsed overrides in the form that Hydra requires.

    Attributes:
        groups: Overrides that select files.
        values: Overrides that set or remove values, in order.
        origins: Maps the dotted key of each leaf that an override sets to the original text.
    """

    groups: list[Any]
    values: list[Any]
    origins: dict[str, str]


def _with_type(override: Any, kind: Any) -> Any:
    """Return a parsed override with another prefix: ``+``, ``++``, ``~`` or none."""
    text = override.input_line.lstrip("+")
    prefix = {"ADD": "+", "FORCE_ADD": "++", "DEL": "~"}.get(kind.name, "")
    return replace(override, type=kind, input_line=prefix + text)


def _remove_preset(tree: dict[Any, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Remove the model's preset from a composed tree, and return it and its problems."""
    model = tree.get("model")
    preset = model.pop(PRESET, None) if isinstance(model, dict) else None
    key = f"model.{PRESET}"
    if preset is None:
        return {}, []
    if not isinstance(preset, dict):
        return {}, [ConfigIssue(key, f"expected keys of it: {', '.join(PRESETS)}", preset)]
    presets = dict.fromkeys(PRESETS)
    return preset, [
        ConfigIssue(f"{key}.{name}", unknown("key", str(name), presets), value)
        for name, value in preset.items()
        if name not in presets
    ]
