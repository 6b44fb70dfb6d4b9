"""Accesses checkpoint storage: a local folder, or an fsspec URL such as ``s3://bucket/run``.

Both are paths: ``pathlib.Path``, or ``upath.UPath`` with the same methods. Remote storage has
neither locks nor atomic renames of folders.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from axonlaunch.checkpoint.format.manifest import CorruptCheckpointError
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig, to_yaml
from axonlaunch.config.values.environment_values import names_environment
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.config.values.url import SCHEME, is_url
from axonlaunch.system.storage import files
from axonlaunch.system.storage.refusals import is_refusal

CHECKPOINTS = "checkpoints"


def storage_path(text: str | Path) -> Path:
    """Return the path for a folder name or a URL.

    Raises:
        ConfigError: The package for this URL is not installed, or the URL can't be reached.
    """
    if isinstance(text, Path) or not is_url(text):
        return Path(text)
    scheme, _, rest = text.partition(SCHEME)
    if scheme in ("file", "local"):
        return Path(rest)
    try:
        from upath import UPath

        # Without a cache, so that files written later by other ranks are found.
        path = UPath(text.rstrip("/"), use_listings_cache=False)
        _ = path.fs
    except ImportError as error:
        message = f"{text}: {error}; pip install 'axonlaunch[remote]', and what fsspec has for it"
        raise ConfigError([ConfigIssue("", message)]) from None
    except (ValueError, OSError) as error:
        raise ConfigError([ConfigIssue("", f"{text}: can't be reached: {_short(error)}")]) from None
    return cast("Path", path)


def root(config: RunConfig) -> Path:
    """Return the parent of a run's ``checkpoints`` folder; ``run_dir`` must be resolved."""
    return storage_path(config.checkpoint.path or config.run_dir)


def checkpoints_parent(run_dir: Path) -> Path:
    """Return the parent of the ``checkpoints`` folder of an existing run.

    Raises:
        OSError: The run folder can't be read.
        ConfigError: The run's ``checkpoint.path`` names an environment variable.
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
    location = settings.get("path") if isinstance(settings, dict) else None
    if not location or not isinstance(location, str):
        return run_dir
    if names_environment(location):  # its author could have a secret value sent to a server
        message = (
            f"{run_dir}: its checkpoint.path={location} names an environment variable, which is "
            "not read from a run's folder; give the place itself"
        )
        raise ConfigError([ConfigIssue("", message)])
    return storage_path(location)


def is_remote(path: Path) -> bool:
    """Return whether a path is a URL and not on a file system of this node."""
    return not isinstance(path, Path)


def filesystem(path: Path) -> Any:
    """Return the fsspec file system of a remote path."""
    return cast("Any", path).fs


def describe(config: RunConfig) -> None:
    """Write a run's configuration next to its checkpoints if they are outside the run folder."""
    if config.checkpoint.path is not None:
        folder = root(config)
        folder.mkdir(parents=True, exist_ok=True)
        if is_remote(folder):
            (folder / CONFIG).write_text(to_yaml(config))
        else:
            files.replace_text(folder / CONFIG, to_yaml(config))


def sizes(folder: Path) -> dict[str, int | None]:
    """Return the size of each file in a folder; {} if the folder does not exist.

    The size of an entry that is not a regular file is None.

    Raises:
        OSError: The folder can't be listed.
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
    """Return the entries of a remote folder by name.

    Raises:
        FileNotFoundError: The bucket does not exist.
    """
    path = cast("Any", folder).path
    try:
        entries = filesystem(folder).ls(path, detail=True)
    except FileNotFoundError:
        # Finds nothing if the folder does not exist, and raises if the bucket does not exist.
        filesystem(folder).find(path)
        return {}
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}


def delete(folder: Path) -> None:
    """Delete a folder with its content; a link is deleted without its target."""
    if is_remote(folder):
        filesystem(folder).rm(cast("Any", folder).path, recursive=True)
    elif folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Convert errors of local or remote storage into a ``ConfigError`` of one line.

    Raises:
        ConfigError: The block raised an ``OSError``, or any error for remote storage, because its
            clients have many error types.
    """
    try:
        yield
    except (ConfigError, CorruptCheckpointError):
        raise
    except Exception as error:
        is_transient = is_remote(path) and not is_refusal(error)
        if is_remote(path):
            message = f"{path}: can't be reached: {_short(error)}"
        elif isinstance(error, OSError):
            message = f"{path}: can't be read: {error.strerror}: {error.filename}"
        else:
            raise
        raise ConfigError([ConfigIssue("", message, is_transient=is_transient)]) from None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
