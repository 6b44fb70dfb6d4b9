"""Reads a YAML file of the user as the primary config, which extends the included one.

A group may be the name of an option, ``strategy: fsdp``, or a mapping. A mapping with a ``name``
replaces the option, so that a frozen ``config.yaml`` is such a file too; other mappings change keys
of the option. A list ``defaults`` selects options as in any Hydra application.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.config.problems.did_you_mean import nearest
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, in_one_line
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.system.storage.files import read_text, why_not_read

ENDINGS = (".yaml", ".yml")
_INCLUDED = "config"
"""The included primary config."""


@dataclass(frozen=True)
class UserFile:
    """A file that is used as the primary config.

    Attributes:
        path: Absolute path.
        name: Name of the primary config, unique for the path and the content.
        tree: Content of the file, with a list ``defaults`` that begins with the included primary
            config.
    """

    path: Path
    name: str
    tree: dict[str, Any]


def split_file(overrides: Sequence[str], config_name: str) -> tuple[list[str], Path | None]:
    """Return the overrides without the user's file, and the file; None if there is none.

    Args:
        overrides: Hydra overrides and at most one name of a file, ``run.yaml``.
        config_name: Name of the primary config, or the name of a file.

    Raises:
        ConfigError: There is more than one file.
    """
    files = [word for word in overrides if is_file(word)]
    rest = [word for word in overrides if not is_file(word)]
    if is_file(config_name):
        files.insert(0, config_name)
    if len(files) > 1:
        message = "only one file can be given; write the keys of all into one"
        raise ConfigError([ConfigIssue("", f"{' '.join(files)}: {message}")])
    return rest, Path(files[0]) if files else None


def is_file(word: str) -> bool:
    """Return whether a word of a command line is the name of a YAML file."""
    return word.endswith(ENDINGS) and "=" not in word


def read_user_file(path: Path, groups: Collection[str]) -> UserFile:
    """Read a file as the primary config.

    Args:
        path: Path of the file.
        groups: Groups of the included primary config.

    Raises:
        ConfigError: The file can't be read, or is no mapping.
    """
    with errors_of_file(path):
        text = read_text(path, at_most=LARGEST_YAML)
        tree = read_yaml(text)
    if dotted := next((key for key in tree if "." in key), None):
        *groups_above, last = dotted.split(".")
        nested = f"{': {'.join([*groups_above, last])}: ...{'}' * len(groups_above)}"
        raise _refuse(path, f"{dotted}: keys are nested in a file; write {nested}")
    defaults = tree.pop("defaults", [])
    if not isinstance(defaults, list):
        raise _refuse(path, "its defaults are not a list; write defaults: [override /model: hf]")
    defaults = [_INCLUDED, "_self_", *(_as_override(entry, groups) for entry in defaults)]
    for group in groups:
        if group not in tree:
            continue
        value = tree[group]
        if value is None or isinstance(value, str):
            defaults.append({f"override /{group}": tree.pop(group)})
        elif isinstance(value, dict) and "name" in value:
            defaults.append({f"override /{group}": None})
    content = f"{path.absolute()}\0{text}"
    name = f"file_{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    chosen = [entry for entry in defaults if entry is not None]
    return UserFile(path.absolute(), name, {"defaults": chosen, **tree})


@contextmanager
def errors_of_file(path: Path) -> Iterator[None]:
    """Name a file in errors while its YAML is read.

    Raises:
        ConfigError: The file can't be read, or is no mapping.
    """
    try:
        yield
    except OSError as error:
        raise _refuse(path, why_not_read(path, error) + _suggest(path)) from None
    except ValueError as error:  # also text that is not UTF-8
        raise _refuse(path, str(error)) from None


def _as_override(entry: Any, groups: Collection[str]) -> Any:
    """Return an entry of ``defaults``; ``model: hf`` selects an option that there is already."""
    if entry in ("_self_", _INCLUDED):
        return None
    if isinstance(entry, dict) and len(entry) == 1:
        [(key, value)] = entry.items()
        if str(key).lstrip("/") in groups:
            return {f"override /{str(key).lstrip('/')}": value}
    return entry


def _refuse(path: Path, message: str) -> ConfigError:
    return ConfigError([ConfigIssue("", f"{in_one_line(str(path))}: {message}")])


def _suggest(path: Path) -> str:
    """Return a suggestion if there is a file with a similar name in the folder."""
    files = [each.name for each in path.parent.glob("*") if each.suffix in ENDINGS]
    close = nearest(path.name, files)
    return f"; did you mean {path.with_name(close)}?" if close else ""
