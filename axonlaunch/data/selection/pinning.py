"""Fixes the commit of each data set of the Hub that a run reads, and downloads it.

All ranks, and the runs that resume, then read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from axonlaunch.config.options.documents import HeldOutConfig, TextRowsConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, gathering
from axonlaunch.config.values.hub_reference import parse_hub_reference
from axonlaunch.data.hub import repository
from axonlaunch.data.hub.repository import HubError, OnDownload
from axonlaunch.data.selection.file_selection import FileSelection, hub_reference


def pinned_data(config: TextRowsConfig, *, earlier: Mapping[str, str]) -> TextRowsConfig:
    """Return the group with a commit for each data set of the Hub, as in ``ORG/NAME@COMMIT``.

    Args:
        config: The group ``data``.
        earlier: Commits of the run that is resumed, by repository; they are used where the user
            named no revision.

    Raises:
        ConfigError: A data set can't be found; the error lists all.
    """
    problems: list[ConfigIssue] = []

    def pin(files: Any, key: str) -> Any:
        return [_pin(file, key, earlier, problems) for file in files]

    def pin_options(options: Mapping[str, Any], key: str) -> dict[str, Any]:
        changed = dict(options)
        if isinstance(options.get("files"), list):
            changed["files"] = pin(options["files"], f"{key}.files")
        held_out = options.get("held_out")
        if isinstance(held_out, list):
            changed["held_out"] = pin(held_out, f"{key}.held_out")
        elif isinstance(held_out, HeldOutConfig):
            files = pin(held_out.files, f"{key}.held_out.files")
            changed["held_out"] = replace(held_out, files=files)
        return changed

    changed = pin_options({"files": config.files, "held_out": config.held_out}, "data")
    mix = {name: pin_options(source, f"data.mix.{name}") for name, source in config.mix.items()}
    if problems:
        raise ConfigError(problems)
    return replace(config, mix=mix, **changed)


def _pin(pattern: str, key: str, earlier: Mapping[str, str], problems: list[ConfigIssue]) -> str:
    reference = hub_reference(pattern)
    if reference is None or reference.commit is not None:
        return pattern
    if reference.revision in (None, repository.DEFAULT_BRANCH) and reference.repo in earlier:
        return str(reference.at(earlier[reference.repo]))
    try:
        return str(repository.pin(reference))
    except (HubError, ImportError) as reason:
        is_transient = isinstance(reason, HubError) and reason.is_transient
        problems.append(ConfigIssue(key, str(reason), pattern, is_transient=is_transient))
        return pattern


def commits_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the commits of data sets of the Hub in a frozen configuration, by repository.

    Args:
        settings: The configuration by dotted key.
    """
    lists = [value for key, value in settings.items() if key.startswith("data.")]
    texts = [text for value in lists if isinstance(value, list) for text in value]
    references = [parse_hub_reference(text) for text in texts if isinstance(text, str)]
    return {
        found.repo: found.commit
        for found in reversed(references)
        if found is not None and found.commit is not None
    }


def names_hub_data(config: TextRowsConfig) -> bool:
    """Return whether a dataset has data sets of the Hub among its files."""
    return any(_is_of_hub(selection) for selection in _selections(config))


def fetch_data(config: TextRowsConfig, *, report: OnDownload = lambda state: None) -> None:
    """Download the files of data sets of the Hub, once for all ranks of this node.

    Raises:
        ConfigError: A file can't be downloaded, or a subset or split does not exist; lists all.
    """
    problems: list[ConfigIssue] = []
    for selection in _selections(config):
        with gathering(problems):
            if _is_of_hub(selection):
                selection.fetch(report)
    if problems:
        raise ConfigError(problems)


def _selections(config: TextRowsConfig) -> Iterator[FileSelection]:
    for name, source in (config.sources() or {"": config}).items():
        key = f"data.mix.{name}" if name else "data"
        yield FileSelection.of_training(source, key=key)
        yield FileSelection.of_held_out(source, key=key)


def _is_of_hub(selection: FileSelection) -> bool:
    return any(hub_reference(file) is not None for file in selection.files)
