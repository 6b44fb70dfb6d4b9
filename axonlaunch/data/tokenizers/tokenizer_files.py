"""Finds and reads the files of a tokenizer, in folders that may not be trusted.

Only regular files inside the folder are read. Nothing is downloaded.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import json
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.config.schema import RunConfig
from axonlaunch.system.storage.files import (
    LARGEST_MODEL_FILE,
    FileCopy,
    NotRegularError,
    TooLargeError,
    inside_folder,
    open_regular,
    read_copy,
    read_text,
    why_not_read,
)
from axonlaunch.system.storage.home import expand_home

_FILE = "tokenizer.json"
_FILES = (
    *("tokenizer*.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.*", "additional_chat_templates/*.jinja"),
)
"""Patterns of the tokenizer's files in a model's folder."""
_ALSO_READ = ("*.json", "*.txt", "*.jinja", "*.codes", "*.spm", "*.tokenizer")
"""Patterns of other files that transformers may open to read a tokenizer."""
_NOT_READ = "*.index.json"
_MODEL_FILE = "config.json"
_MODEL_KEYS = ("model_type", "tokenizer_class", "model_name")
"""Keys, outside the tokenizer's files, by which transformers selects a tokenizer's class."""


def tokenizer_of(config: RunConfig) -> TokenizerConfig:
    """Return the tokenizer of a run; by default the one in the folder of its model."""
    configured = config.tokenizer
    is_default = configured.name == "auto" and not configured.path
    if not is_default or config.model_path is None:
        return configured
    return replace(configured, path=config.model_path)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return a tokenizer's files in a folder, by name. Links and special files are included."""
    found = {file for pattern in _FILES for file in folder.glob(pattern)}
    return sorted(file for file in found if not file.is_dir())


def folder_at(path: str) -> Path:
    """Return the folder of the tokenizer at a path, or of a model id in the Hub's cache.

    Raises:
        ConfigError: The folder does not exist, or has no tokenizer files.
    """
    expanded = expand_home(path)
    if expanded.is_file():
        if expanded.name != _FILE:
            raise path_error(f"is a file; give its folder, or a {_FILE}", path)
        return expanded.parent
    folder = expanded if expanded.is_dir() else _cached_folder(path)
    if not tokenizer_files(folder):
        message = f"has no {_FILE} or other file of a tokenizer; give a folder that has, or null"
        raise path_error(message, path)
    return folder


def stamp_of(path: str) -> object:
    """Return a value that changes with the files of the tokenizer at a path."""
    folder = folder_at(path)
    files = (inside_folder(f, depth=_depth(f, folder)) for f in tokenizer_files(folder))
    return tuple((str(file), file.lstat().st_mtime_ns) for file in files if file.exists())


def foreign_files(folder: Path, *, key: str = "", path: str | None = None) -> dict[str, FileCopy]:
    """Read a tokenizer's files from a folder that may not be trusted, by their path in it.

    Args:
        key: Configuration key with the path; empty for none.
        path: Value of the key.

    Raises:
        ConfigError: A file is not regular, is a link out of the folder, or is too large.
    """
    contents = {}
    for file in tokenizer_files(folder):
        with _refusing(file, key, path):
            name = file.relative_to(folder).as_posix()
            contents[name] = read_copy(_target(file, folder), at_most=LARGEST_MODEL_FILE)
    return contents


def refuse_links_outside(folder: Path, path: str) -> None:
    """Refuse a folder in which transformers would read anything but regular files of the folder.

    Args:
        path: Value of ``tokenizer.path``.

    Raises:
        ConfigError: A file is not regular, is a link out of the folder, or is too large.
    """
    for pattern in _ALSO_READ:
        for file in sorted(folder.glob(pattern)):
            if file.match(_NOT_READ) or file.is_dir():
                continue
            with _refusing(file, "tokenizer.path", path):
                with open_regular(_target(file, folder)) as stream:
                    size = os.fstat(stream.fileno()).st_size
                if size > LARGEST_MODEL_FILE:
                    raise TooLargeError(errno.EFBIG, f"is larger than {LARGEST_MODEL_FILE} bytes")


def model_of_folder(folder: Path) -> dict[str, str]:
    """Return the facts in a model's configuration by which a tokenizer's class is selected.

    If the file can't be read, the result is empty, as for transformers.
    """
    try:
        file = inside_folder(folder / _MODEL_FILE)
        content = json.loads(read_text(file, at_most=LARGEST_MODEL_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    model = content if isinstance(content, dict) else {}
    return {key: model[key] for key in _MODEL_KEYS if isinstance(model.get(key), str)}


def with_model(contents: Mapping[str, FileCopy], model: Mapping[str, str]) -> dict[str, FileCopy]:
    """Return a tokenizer's files with a ``config.json`` for the selection of its class."""
    if not model:
        return {**contents}
    mode = functools.reduce(operator.and_, (file.mode for file in contents.values()), 0o666)
    return {**contents, _MODEL_FILE: FileCopy(json.dumps(model).encode(), mode)}


def path_error(message: str, path: str) -> ConfigError:
    """Return an error about ``tokenizer.path``."""
    return ConfigError([ConfigIssue("tokenizer.path", message, path)])


def _target(file: Path, folder: Path) -> Path:
    """Return the target of ``inside_folder``; a file in a folder that is a link is refused."""
    depth = _depth(file, folder)
    if depth and file.parent.is_symlink():
        raise NotRegularError(errno.EINVAL, "is in a folder that is a link")
    return inside_folder(file, depth=depth)


def _depth(file: Path, folder: Path) -> int:
    """Return the number of folders between a folder and a file in it."""
    return len(file.relative_to(folder).parts) - 1


@contextmanager
def _refusing(file: Path, key: str, path: str | None) -> Iterator[None]:
    """Raise ConfigError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        message = f"{file}: can't be read: {why_not_read(file, error)}"
        raise ConfigError([ConfigIssue(key, message, ... if path is None else path)]) from None


def _cached_folder(path: str) -> Path:
    """Return the folder of a model id in the Hub's cache.

    Raises:
        ConfigError: The model id is not in the cache.
    """
    if importlib.util.find_spec("huggingface_hub") is not None:
        hub: Any = importlib.import_module("huggingface_hub")
        try:
            return Path(hub.snapshot_download(path, local_files_only=True))
        except Exception:  # any error means that it is not in the cache
            pass
    message = f"there is no such folder, seen from {Path.cwd()}"
    if not path.startswith((".", "/", "~")):  # it may be a model id
        message += f"; for a model id, run hf download {path} first"
    raise path_error(message, path)
