"""Where checkpoints are kept: a folder, or a place that an fsspec URL names (``s3://bucket/run``).

Both are paths: ``pathlib``'s, or ``upath``'s with the same methods. What a remote place lacks is
locks, and folders that are renamed at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from axonlaunch.config import CONFIG, ConfigError, Problem, RunConfig, to_yaml
from axonlaunch.config.tree import read_yaml
from axonlaunch.config.url import SCHEME, is_url

CHECKPOINTS = "checkpoints"


def place(text: str | Path) -> Path:
    """Return a path of a folder's name or a URL.

    Raises:
        ConfigError: What reaches such a URL is not installed, or nothing does.
    """
    if isinstance(text, Path) or not is_url(text):
        return Path(text)
    scheme, _, rest = text.partition(SCHEME)
    if scheme in ("file", "local"):
        return Path(rest)
    try:
        from upath import UPath

        # What other ranks have written since is not to be missed.
        found = UPath(text.rstrip("/"), use_listings_cache=False)
        _ = found.fs
    except ImportError as error:
        message = f"{text}: {error}; pip install 'axonlaunch[remote]', and what fsspec has for it"
        raise ConfigError([Problem("", message)]) from None
    except (ValueError, OSError) as error:
        raise ConfigError([Problem("", f"{text}: can't be reached: {_short(error)}")]) from None
    return cast("Path", found)


def root(config: RunConfig) -> Path:
    """Return where a run keeps its ``checkpoints`` folder; its ``run_dir`` is resolved."""
    return place(config.checkpoint.path or config.run_dir)


def kept_by(run_dir: Path) -> Path:
    """Return where the run of a folder keeps its ``checkpoints`` folder."""
    if is_remote(run_dir) or (run_dir / CHECKPOINTS).exists():
        return run_dir
    try:
        told = read_yaml((run_dir / CONFIG).read_text()).get("checkpoint")
    except (OSError, ValueError):
        return run_dir
    return place(told.get("path") or run_dir) if isinstance(told, dict) else run_dir


def is_remote(path: Path) -> bool:
    """Return whether a path is not on a file system of this machine."""
    return not isinstance(path, Path)


def filesystem(path: Path) -> Any:
    """Return the fsspec file system of a remote path."""
    return cast("Any", path).fs


def describe(config: RunConfig) -> None:
    """Write a run's configuration beside its checkpoints, if they are not in its folder."""
    if config.checkpoint.path is not None:
        folder = root(config)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(to_yaml(config))


def sizes(folder: Path) -> dict[str, int]:
    """Return the files of a folder and their bytes; {} where there is none."""
    if is_remote(folder):
        try:
            entries = filesystem(folder).ls(cast("Any", folder).path, detail=True)
        except FileNotFoundError:
            return {}
        files = (entry for entry in entries if entry["type"] == "file")
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in files}
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as found:
        return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}


def delete(folder: Path) -> None:
    """Delete a folder and what is in it."""
    if is_remote(folder):
        filesystem(folder).rm(cast("Any", folder).path, recursive=True)
    else:
        shutil.rmtree(folder)


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Say in one line what a remote place can't be reached for.

    Raises:
        ConfigError: An error of its client; clients have errors of many kinds.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        raise ConfigError([Problem("", f"{path}: can't be reached: {_short(error)}")]) from None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
