"""What a command is to write, checked before any work; what can't be written is the user's to mend.

It writes nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_file(option: str, path: Path, *, endings: tuple[str, ...] = ()) -> None:
    """Say before any work whether a file can be written there.

    Args:
        option: Which asks for it, ``--plot``.
        path: The file.
        endings: One of which it must have, if any is given.

    Raises:
        ConfigError: The path is a folder itself, there is no folder for it or none that can be
            written to, or it has another ending.
    """
    reason, folder = "", path.parent
    if path.is_dir():
        reason = "is a folder; give a file in it"
        reason += f", ending in {' or '.join(endings)}" if endings else ""
    elif endings and path.suffix.lower() not in endings:
        reason = f"must end in {' or '.join(endings)}"
    elif not folder.is_dir():
        reason = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        reason += "; write elsewhere" if folder.exists() else "; make it, or write elsewhere"
    elif not os.access(folder, os.W_OK):
        reason = f"{folder} can't be written to; write elsewhere"
    if reason:
        from axonlaunch.config import ConfigError, ConfigIssue

        raise ConfigError([ConfigIssue(option, reason, str(path))])


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Let what keeps a file or a folder from being written be an error of the option.

    Raises:
        ConfigError: It can't be written.
    """
    try:
        yield
    except OSError as error:
        from axonlaunch.config import ConfigError, ConfigIssue

        reason = f"can't be written: {error.strerror}; write elsewhere"
        raise ConfigError([ConfigIssue(option, reason, str(path))]) from error
