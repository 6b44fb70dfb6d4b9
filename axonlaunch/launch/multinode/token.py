"""Reads and creates the secret token that the nodes or ranks of a run share.

A file that other users can read or write is an error. The token itself is never a configuration
key, an argument or an environment variable.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.system.storage.cache import cache_folder
from axonlaunch.system.storage.home import expand_home

NEW_FILE = "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"
"""Shell command that creates a token file."""
POD_FILE = "/run/axonlaunch/token/token"
"""File in a pod with the token of its run, from a Secret.

Kubernetes mounts it for this container only. It belongs to root, and a process of another user can
read it only if everyone can.
"""
_LEAST, _MOST = 16, 4096


def read_token(launch: LaunchConfig) -> bytes | None:
    """Return the token in ``launch.token_file``; None if the key is not set.

    Raises:
        ConfigError: The file can't be read or is not a valid secret.
    """
    if launch.token_file is None:
        return None
    try:
        is_of_pod = launch.token_file == POD_FILE
        return _secret(expand_home(launch.token_file), is_of_pod=is_of_pod)
    except OSError as error:
        message = f"can't read it ({error.strerror})"
    except ValueError as error:
        message = str(error)
    raise ConfigError([ConfigIssue("launch.token_file", message, launch.token_file)])


def user_token() -> bytes | None:
    """Return a token shared by all processes of this user on this node; create it if necessary.

    Returns:
        The token, or None if it can't be stored in the user's cache folder.

    Raises:
        ConfigError: The stored file is not a valid secret.
    """
    try:
        path = cache_folder() / "token"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            create_token(path)
        return _secret(path)
    except OSError:
        return None
    except ValueError as error:
        raise ConfigError([ConfigIssue(str(path), f"{error}; or delete it")]) from None


def create_token(path: Path) -> None:
    """Write a random token to a file that only its owner can read; keep an existing file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")
    try:
        # A link is created atomically: only the first of several ranks succeeds, and no rank reads
        # an incomplete token.
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink()


def missing_token(launch: LaunchConfig, *, address: str) -> str:
    """Return a warning about a run without a token.

    Raises:
        ConfigError: ``launch.require_token`` is set.
    """
    if launch.require_token:
        message = f"the nodes share no secret; write launch.token_file=FILE, made by {NEW_FILE}"
        raise ConfigError([ConfigIssue("launch.require_token", message, True)])
    return (
        f"warning: without launch.token_file, anyone who can connect to {address} can run code as "
        f"this user in this run; give every node the same secret file, made by {NEW_FILE}"
    )


def _secret(path: Path, *, is_of_pod: bool = False) -> bytes:
    """Read a token.

    Args:
        path: File of the token.
        is_of_pod: Whether only this container has the file, so that everyone may read it.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is not a valid secret.
    """
    # Check the opened file, so that it can't be exchanged between check and use. Opening does not
    # wait for a FIFO.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"belongs to user {status.st_uid}; make a file of your own")
        is_shared = status.st_mode & (0o022 if is_of_pod and status.st_uid == 0 else 0o077)
        if is_shared:
            mode = stat.S_IMODE(status.st_mode)
            raise ValueError(f"others can read or write it (mode {mode:04o}); use chmod 600")
        content = file.read(_MOST + 1).strip()
    if not _LEAST <= len(content) <= _MOST:
        size = "empty" if not content else f"{len(content)} bytes"
        raise ValueError(
            f"it is {size}, but a token needs {_LEAST} to {_MOST}; create it with {NEW_FILE}"
        )
    return content
