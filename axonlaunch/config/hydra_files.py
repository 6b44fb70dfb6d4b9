"""Folders of YAML as Hydra reads them: each file, and each choice of files, once.

An option that is registered has no file; it is read as if it had one that says its name alone.

Hydra's own ``load_configuration`` reads every file, and those of its own settings, for each
configuration. Everything of it that is not public API is used here alone.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class HydraFiles:
    """The files of some folders, the first of which comes first; they are expected not to change.

    Errors of Hydra, OmegaConf and YAML pass.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        open_groups: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> None:
        """Look into folders; the last is our own.

        Args:
            folders: Where groups are.
            open_groups: Those whose options may be registered, and need no file.
            absent: ``GROUP/OPTION`` of those of them that nobody registered.
        """
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.utils import create_config_search_path

        *foreign, ours = folders
        search_path = create_config_search_path(ours.as_uri())
        for folder in reversed(foreign):
            search_path.prepend("user", folder.as_uri())
        self._loader = ConfigLoaderImpl(search_path)
        # A user's file may name what configures Hydra, which is then merged and left out; ours
        # never do, and half of all files to read are Hydra's.
        self._with_hydra = bool(foreign)
        self._folders, self._open_groups, self._absent = folders, open_groups, absent
        self._repositories: dict[str, Any] = {}
        self._lists: dict[tuple[str, ...], Any] = {}
        self._trees: dict[tuple[str, ...], Any] = {}
        self._parsed: dict[str, Any] = {}

    def has_file(self, name: str) -> bool:
        """Return whether there is a file of this name: a primary config, or ``GROUP/OPTION``."""
        return bool(self._loader.repository.config_exists(name))

    def has_group(self, name: str) -> bool:
        """Return whether there is a folder of options of this name."""
        return bool(self._loader.repository.group_exists(name))

    def groups(self) -> list[str]:
        """Return the groups at the top, ours and a user's."""
        from hydra.core.object_type import ObjectType

        groups = self._loader.repository.get_group_options("", ObjectType.GROUP)
        return [name for name in groups if name != "hydra"]

    def options(self, group: str) -> list[str]:
        """Return the options of a group for which there is a file, sorted."""
        return list(self._loader.repository.get_group_options(group))

    def without_file(self, config_name: str, groups: Sequence[Any]) -> dict[str, str]:
        """Return ``{group: option}`` of a choice's options for which there is no file."""
        paths = (default.config_path for default in self.chosen(config_name, groups))
        split = ((path, *path.rpartition("/")[::2]) for path in paths)
        return {
            group: option
            for path, group, option in split
            if group in self._open_groups and not self.has_file(path)
        }

    def without_optional(
        self, config_name: str, groups: Sequence[Any], absent: Collection[str]
    ) -> HydraFiles:
        """Return files that lack those of ``absent`` which are ``optional`` in a choice.

        Args:
            config_name: The primary config.
            groups: Parsed overrides of groups.
            absent: ``GROUP/OPTION`` of options that nobody registered.
        """
        optional = {path for path in absent if self._lacking([path])._is_whole(config_name, groups)}
        return self._lacking(optional) if optional else self

    def _lacking(self, absent: Collection[str]) -> HydraFiles:
        return HydraFiles(self._folders, open_groups=self._open_groups, absent=absent)

    def _is_whole(self, config_name: str, groups: Sequence[Any]) -> bool:
        """Return whether nothing is missed: Hydra passes over what is optional."""
        from hydra.errors import MissingConfigException

        try:
            self.chosen(config_name, groups)
        except MissingConfigException:
            return False
        return True

    def parse(self, text: str) -> Any:
        """Return Hydra's ``Override`` of a text; who changes it copies it."""
        if text not in self._parsed:
            self._parsed[text] = self._parser.parse_overrides([text])[0]
        return self._parsed[text]

    @cached_property
    def _parser(self) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        return OverridesParser.create(config_loader=self._loader)

    def groups_in(self, config_name: str) -> frozenset[str]:
        """Return the groups that the primary config, or an experiment it takes, names."""
        return frozenset(self._list(config_name, ()).overrides.known_choices)

    def chosen(self, config_name: str, groups: Sequence[Any]) -> list[Any]:
        """Return Hydra's list of files, in the order in which they are merged.

        Args:
            config_name: The primary config.
            groups: Parsed overrides of groups.
        """
        return list(self._list(config_name, groups).defaults)

    def compose(self, config_name: str, groups: Sequence[Any], values: Sequence[Any]) -> Any:
        """Return the DictConfig of files with values set in it.

        Args:
            config_name: The primary config.
            groups: Parsed overrides of groups.
            values: Parsed overrides of values, in the order in which they are applied.
        """
        key = _key(config_name, groups)
        if key not in self._trees:
            self._trees[key] = self._merge_files(config_name, self.chosen(config_name, groups))
        tree = copy.deepcopy(self._trees[key])
        for override in values:
            if not override.is_delete() and isinstance(override.value(), list):
                _make_way(tree, override.key_or_group)
            self._loader._apply_overrides_to_config([override], tree)
        return tree

    def content(self, config_name: str, default: Any) -> Any:
        """Return the DictConfig of one file of a choice, where its package puts it."""
        repository = self._repository(config_name)
        return self._loader._load_single_config(default=default, repo=repository).config

    def _list(self, config_name: str, groups: Sequence[Any]) -> Any:
        from hydra._internal.defaults_list import create_defaults_list

        key = _key(config_name, groups)
        if key not in self._lists:
            self._lists[key] = create_defaults_list(
                repo=self._repository(config_name),
                config_name=config_name,
                overrides_list=list(groups),
                prepend_hydra=self._with_hydra,
                skip_missing=False,
            )
        return self._lists[key]

    def _merge_files(self, config_name: str, files: list[Any]) -> Any:
        from omegaconf import OmegaConf

        repository = self._repository(config_name)
        tree = self._loader._compose_config_from_defaults_list(defaults=files, repo=repository)
        tree.pop("hydra", None)
        OmegaConf.set_struct(tree, True)
        return tree

    def _repository(self, config_name: str) -> Any:
        """Return what reads files; the primary config may add folders to those it reads from."""
        if config_name not in self._repositories:
            from hydra._internal.config_repository import CachingConfigRepository
            from hydra.plugins.config_source import ConfigResult
            from omegaconf import OmegaConf

            open_groups, absent = self._open_groups, self._absent

            class Copies(CachingConfigRepository):  # type: ignore[misc]
                """Hydra merges into what it has read; the next choice reads it unchanged."""

                def load_config(self, config_path: str) -> Any:
                    if (result := super().load_config(config_path)) is not None:
                        return copy.deepcopy(result)
                    group, _, option = config_path.rpartition("/")
                    if group not in open_groups or config_path in absent:
                        return None
                    named = OmegaConf.create({"name": option})
                    return ConfigResult(
                        provider="registered", path=config_path, config=named, header=_OWN_PACKAGE
                    )

            repository = Copies(self._loader.repository)
            self._loader._process_config_searchpath(config_name, [], repository)
            self._repositories[config_name] = repository
        return self._repositories[config_name]


_OWN_PACKAGE = {"package": None}
"""Header of a file whose keys are its group's."""


def _make_way(tree: Any, key: str) -> None:
    """Take away keys in whose place a list is to stand.

    Hydra can't merge it into them; the schema then says what is expected there.
    """
    from omegaconf import DictConfig, OmegaConf

    if isinstance(OmegaConf.select(tree, key, throw_on_resolution_failure=False), DictConfig):
        OmegaConf.update(tree, key, None, merge=False)


def _key(config_name: str, groups: Sequence[Any]) -> tuple[str, ...]:
    return (config_name, *(override.input_line for override in groups))
