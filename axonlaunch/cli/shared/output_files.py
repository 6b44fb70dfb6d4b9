"""Checks before any work that an output file can be written, and reports failures to write it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_file(option: str, path: Path, *, endings: tuple[str, ...] = ()) -> None:
    """Check that a file can be written.

    Args:
        option: Option that names the file, for example ``--plot``.
        path: File to write.
        endings: Allowed file name endings; empty allows all.

    Raises:
        ConfigError: The path is a folder, its parent folder is missing or not writable, or its
            ending is not allowed.
    """
    reason, folder = "", path.parent
    if path.is_dir():
        reason = "is a folder; write to a file in it"
        reason += f", ending in {' or '.join(endings)}" if endings else ""
    elif endings and path.suffix.lower() not in endings:
        reason = f"must end in {' or '.join(endings)}"
    elif not folder.is_dir():
        reason = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        reason += "; write elsewhere" if folder.exists() else "; create it, or write elsewhere"
    elif not os.access(folder, os.W_OK):
        reason = f"{folder} can't be written to; write elsewhere"
    if reason:
        from axonlaunch.config import ConfigError, ConfigIssue

        raise ConfigError([ConfigIssue(option, reason, str(path))])


def option_file_problem(path: Path, group: str) -> str:
    """Return why a file can't become a new option of a configuration group; empty if it can."""
    if path.suffix != ".yaml":
        return "must end in .yaml"
    if path.parent.name != group:
        return f"must be in a folder named {group}; write {group}/{path.name}"
    return "already exists; give another name, or remove it" if path.exists() else ""


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Convert an ``OSError`` in the block to an error of the option.

    Raises:
        ConfigError: The file or folder can't be written.
    """
    try:
        yield
    except OSError as error:
        from axonlaunch.config import ConfigError, ConfigIssue

        reason = f"can't be written: {error.strerror}; write elsewhere"
        raise ConfigError([ConfigIssue(option, reason, str(path))]) from error
