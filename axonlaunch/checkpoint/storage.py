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

from axonlaunch.checkpoint.manifest import CorruptCheckpointError
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig, to_yaml
from axonlaunch.config.environment_values import names_environment
from axonlaunch.config.plain import LARGEST_YAML, read_yaml
from axonlaunch.config.url import SCHEME, is_url
from axonlaunch.system import files

CHECKPOINTS = "checkpoints"


def storage_path(text: str | Path) -> Path:
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
        path = UPath(text.rstrip("/"), use_listings_cache=False)
        _ = path.fs
    except ImportError as error:
        message = f"{text}: {error}; pip install 'axonlaunch[remote]', and what fsspec has for it"
        raise ConfigError([ConfigIssue("", message)]) from None
    except (ValueError, OSError) as error:
        raise ConfigError([ConfigIssue("", f"{text}: can't be reached: {_short(error)}")]) from None
    return cast("Path", path)


def root(config: RunConfig) -> Path:
    """Return where a run keeps its ``checkpoints`` folder; its ``run_dir`` is resolved."""
    return storage_path(config.checkpoint.path or config.run_dir)


def kept_by(run_dir: Path) -> Path:
    """Return where the run of a folder keeps its ``checkpoints`` folder.

    Raises:
        OSError: That can't be found out.
    """
    if is_remote(run_dir) or files.is_there(run_dir / CHECKPOINTS):
        return run_dir
    try:
        frozen = read_yaml(files.read_text(run_dir / CONFIG, at_most=LARGEST_YAML))
    except (FileNotFoundError, NotADirectoryError, files.NotRegularError, files.TooLargeError):
        return run_dir
    except ValueError:
        return run_dir
    settings = frozen.get("checkpoint")
    where = settings.get("path") if isinstance(settings, dict) else None
    if not where or not isinstance(where, str):
        return run_dir
    if names_environment(where):  # whoever wrote it could have a value sent to a server
        message = (
            f"{run_dir}: its checkpoint.path={where} names an environment variable, which is not "
            "read from a run's folder; give the place itself"
        )
        raise ConfigError([ConfigIssue("", message)])
    return storage_path(where)


def is_remote(path: Path) -> bool:
    """Return whether a path is not on a file system of this node."""
    return not isinstance(path, Path)


def filesystem(path: Path) -> Any:
    """Return the fsspec file system of a remote path."""
    return cast("Any", path).fs


def describe(config: RunConfig) -> None:
    """Write a run's configuration beside its checkpoints, if they are not in its folder."""
    if config.checkpoint.path is not None:
        folder = root(config)
        folder.mkdir(parents=True, exist_ok=True)
        if is_remote(folder):
            (folder / CONFIG).write_text(to_yaml(config))
        else:
            files.replace_text(folder / CONFIG, to_yaml(config))


def sizes(folder: Path) -> dict[str, int | None]:
    """Return the bytes of each file in a folder, None of what is no regular file; {} without one.

    Raises:
        OSError: It can't be listed.
    """
    if is_remote(folder):
        return {
            name: entry["size"] if entry["type"] == "file" else None
            for name, entry in _entries(folder).items()
        }
    try:
        with os.scandir(folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                if entry.is_file(follow_symlinks=False)
                else None
                for entry in entries
            }
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a remote folder holds, by name.

    Raises:
        FileNotFoundError: There is no such bucket.
    """
    there = cast("Any", folder).path
    try:
        entries = filesystem(folder).ls(there, detail=True)
    except FileNotFoundError:
        # Of a folder that is not there this finds nothing, of a bucket that is not it is an error.
        filesystem(folder).find(there)
        return {}
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}


def delete(folder: Path) -> None:
    """Delete a folder and what is in it; of a link the link alone."""
    if is_remote(folder):
        filesystem(folder).rm(cast("Any", folder).path, recursive=True)
    elif folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Say in one line what a place can't be reached, or a folder not be read, for.

    Raises:
        ConfigError: Any error of the system's or of a remote place's client; clients have errors of
            many kinds.
    """
    try:
        yield
    except (ConfigError, CorruptCheckpointError):
        raise
    except Exception as error:
        if is_remote(path):
            message = f"{path}: can't be reached: {_short(error)}"
        elif isinstance(error, OSError):
            message = f"{path}: can't be read: {error.strerror}: {error.filename}"
        else:
            raise
        raise ConfigError([ConfigIssue("", message)]) from None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
