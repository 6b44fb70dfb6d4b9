"""Reads folders of YAML by Hydra; each file and each selection of files is read only once.

A registered option without a file is read as a file that contains only its name.

Hydra's ``load_configuration`` would read all files, and Hydra's settings, every time.
All uses of Hydra's private API are in this module.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from axonlaunch.config.composition.user_file import UserFile, errors_of_file
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.home import expand_home_in


class HydraFiles:
    """YAML files of several folders; earlier folders have priority. The files must not change.

    Errors of Hydra, OmegaConf and YAML are not caught.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        open_groups: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> None:
        """Open folders.

        Args:
            folders: Folders with groups; the last one has the included YAML.
            open_groups: Groups with options that can be registered and need no file.
            absent: ``GROUP/OPTION`` of options in open groups that are not registered.
        """
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.utils import create_config_search_path

        *user_folders, included = folders
        search_path = create_config_search_path(included.as_uri())
        for folder in reversed(user_folders):
            search_path.prepend("user", folder.as_uri())
        self._loader = ConfigLoaderImpl(search_path)
        # A user's file may name settings of Hydra, which are then merged and left out. Included
        # files never do, and skipping Hydra's settings halves the number of files to read.
        self._with_hydra = bool(user_folders)
        self._folders, self._open_groups, self._absent = folders, open_groups, absent
        self._repositories: dict[str, Any] = {}
        self._lists: dict[tuple[str, ...], Any] = {}
        self._trees: dict[tuple[str, ...], Any] = {}
        self._parsed: dict[str, Any] = {}
        self._user_files: dict[str, UserFile] = {}

    def add_primary(self, file: UserFile) -> None:
        """Make a file of the user known as a primary config with its name."""
        self._user_files[file.name] = file

    def path_of_primary(self, name: str) -> Path | None:
        """Return the path of a primary config that is a file of the user; None for others."""
        return self._user_files[name].path if name in self._user_files else None

    def has_file(self, name: str) -> bool:
        """Return whether there is a file with this name: a primary config, or ``GROUP/OPTION``."""
        return name in self._user_files or bool(self._loader.repository.config_exists(name))

    def has_group(self, name: str) -> bool:
        """Return whether there is a folder of options with this name."""
        return bool(self._loader.repository.group_exists(name))

    def groups(self) -> list[str]:
        """Return the top-level groups of all folders."""
        from hydra.core.object_type import ObjectType

        groups = self._loader.repository.get_group_options("", ObjectType.GROUP)
        return [name for name in groups if name != "hydra"]

    def options(self, group: str) -> list[str]:
        """Return the options of a group that have a file, sorted."""
        return list(self._loader.repository.get_group_options(group))

    def without_file(self, config_name: str, groups: Sequence[Any]) -> dict[str, str]:
        """Return ``{group: option}`` of selected options in open groups that have no file."""
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
        """Return files without the ``absent`` options that are ``optional`` in the selection.

        Args:
            config_name: The primary config.
            groups: Parsed overrides of groups.
            absent: ``GROUP/OPTION`` of options that are not registered.
        """
        optional = {
            path for path in absent if self._without([path])._is_complete(config_name, groups)
        }
        return self._without(optional) if optional else self

    def _without(self, absent: Collection[str]) -> HydraFiles:
        files = HydraFiles(self._folders, open_groups=self._open_groups, absent=absent)
        files._user_files = self._user_files
        return files

    def _is_complete(self, config_name: str, groups: Sequence[Any]) -> bool:
        """Return whether no required file is missing; Hydra skips optional ones."""
        from hydra.errors import MissingConfigException

        try:
            self.chosen(config_name, groups)
        except MissingConfigException:
            return False
        return True

    def parse(self, text: str) -> Any:
        """Return the cached ``Override`` of a text; callers must not modify it."""
        if text not in self._parsed:
            self._parsed[text] = self._parser.parse_overrides([text])[0]
        return self._parsed[text]

    @cached_property
    def _parser(self) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        return OverridesParser.create(config_loader=self._loader)

    def groups_in(self, config_name: str) -> frozenset[str]:
        """Return the groups in the primary config and in an experiment that it selects."""
        return frozenset(self._list(config_name, ()).overrides.known_choices)

    def chosen(self, config_name: str, groups: Sequence[Any]) -> list[Any]:
        """Return Hydra's list of selected files, in the order in which they are merged.

        Args:
            config_name: The primary config.
            groups: Parsed overrides of groups.
        """
        return list(self._list(config_name, groups).defaults)

    def compose(self, config_name: str, groups: Sequence[Any], values: Sequence[Any]) -> Any:
        """Return the DictConfig of the selected files with values applied.

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
                _remove_mapping(tree, override.key_or_group)
            self._loader._apply_overrides_to_config([override], tree)
        return tree

    def content(self, config_name: str, default: Any) -> Any:
        """Return the DictConfig of one selected file, below the key of its package."""
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
        if self._with_hydra or config_name in self._user_files:
            plain = OmegaConf.to_container(tree, resolve=False)
            tree = OmegaConf.create(expand_home_in(plain, unchanged=_OF_NODES))
        OmegaConf.set_struct(tree, True)
        return tree

    def _repository(self, config_name: str) -> Any:
        """Return the repository of files; the primary config may extend its search path."""
        if config_name not in self._repositories:
            from hydra._internal.config_repository import CachingConfigRepository
            from hydra.plugins.config_source import ConfigResult
            from omegaconf import OmegaConf

            open_groups, absent = self._open_groups, self._absent
            user_files, folders = self._user_files, self._folders[:-1]

            class CopyingRepository(CachingConfigRepository):  # type: ignore[misc]
                """Repository that returns copies, because Hydra merges into the trees it reads."""

                def config_exists(self, config_path: str) -> bool:
                    return config_path in user_files or bool(super().config_exists(config_path))

                def load_config(self, config_path: str) -> Any:
                    if (result := super().load_config(config_path)) is not None:
                        return _with_plain_numbers(copy.deepcopy(result), config_path, folders)
                    group, _, option = config_path.rpartition("/")
                    if group not in open_groups or config_path in absent:
                        return None
                    named = OmegaConf.create({"name": option})
                    return ConfigResult(
                        provider="registered", path=config_path, config=named, header=_OWN_PACKAGE
                    )

            repository = CopyingRepository(self._loader.repository)
            if (file := self._user_files.get(config_name)) is not None:
                repository.cache[f"config_path={config_name}"] = self._read(file)
            self._loader._process_config_searchpath(config_name, [], repository)
            self._repositories[config_name] = repository
        return self._repositories[config_name]

    def _read(self, file: UserFile) -> Any:
        """Return a file of the user as Hydra reads a file of a folder."""
        from hydra.plugins.config_source import ConfigResult
        from omegaconf import OmegaConf

        tree, repository = OmegaConf.create(file.tree), self._loader.repository
        defaults = repository._extract_defaults_list(str(file.path), tree)
        return ConfigResult(
            provider="user",
            path=str(file.path),
            config=tree,
            header=_OWN_PACKAGE,
            defaults_list=repository._create_defaults_list(str(file.path), defaults),
        )


def _with_plain_numbers(result: Any, config_path: str, folders: Sequence[Path]) -> Any:
    """Replace the content of a file in the user's folders by what ``read_yaml`` reads.

    Hydra takes 12:00:00 for 43,200 and 010 for 8.

    Raises:
        ConfigError: The file is no mapping.
    """
    from omegaconf import OmegaConf

    files = (folder / f"{config_path}.yaml" for folder in folders)
    file = next((file for file in files if file.is_file()), None)
    if file is not None and result.config:
        with errors_of_file(file):
            tree = read_yaml(read_text(file, at_most=LARGEST_YAML))
        tree.pop("defaults", None)
        result.config = OmegaConf.create(tree)
    return result


_OF_NODES = ("launch.slurm.prologue",)
"""Keys with lines for a shell of another machine, which expands ``~/`` itself."""
_OWN_PACKAGE = {"package": None}
"""Header of a file with the keys of its group."""


def _remove_mapping(tree: Any, key: str) -> None:
    """Remove a mapping that a list replaces.

    Hydra can't merge a list into a mapping; the schema checks later which of them is expected.
    """
    from omegaconf import DictConfig, OmegaConf

    if isinstance(OmegaConf.select(tree, key, throw_on_resolution_failure=False), DictConfig):
        OmegaConf.update(tree, key, None, merge=False)


def _key(config_name: str, groups: Sequence[Any]) -> tuple[str, ...]:
    return (config_name, *(override.input_line for override in groups))
