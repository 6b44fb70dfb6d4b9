"""The token that the nodes or ranks of a run share: where it comes from, and what a run is without.

A file that others may read or write is refused. It is never a key, an argument or a variable.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.launch import LaunchConfig
from axonlaunch.system.cache import cache_folder

NEW_FILE = "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"
"""What makes a token file."""
_LEAST, _MOST = 16, 4096


def read_token(launch: LaunchConfig) -> bytes | None:
    """Return the token of ``launch.token_file``; None where there is none.

    Raises:
        ConfigError: The file can't be read, or is no secret.
    """
    if launch.token_file is None:
        return None
    try:
        return _secret(Path(launch.token_file).expanduser())
    except OSError as error:
        message = f"can't read it ({error.strerror})"
    except ValueError as error:
        message = str(error)
    raise ConfigError([ConfigIssue("launch.token_file", message, launch.token_file)])


def of_this_user() -> bytes | None:
    """Return the token that all processes of this user on this node find; it is made once.

    Returns:
        None where this user's cache folder can't keep one.

    Raises:
        ConfigError: What is kept there is no secret.
    """
    try:
        path = cache_folder() / "token"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            create_token(path)
        return _secret(path)
    except (OSError, RuntimeError):  # the latter: there is no home
        return None
    except ValueError as error:
        raise ConfigError([ConfigIssue(str(path), f"{error}; or delete it")]) from None


def create_token(path: Path) -> None:
    """Write a random token to a file that only its owner can read; one that exists is kept."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")
    try:
        # Of several ranks that come here at once one is first; nobody reads half a token.
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink()


def missing_token(launch: LaunchConfig, *, address: str) -> str:
    """Say what a neighbour can do to a run without a token.

    Raises:
        ConfigError: ``launch.require_token`` is set.
    """
    if launch.require_token:
        message = f"the nodes share no secret; write launch.token_file=FILE, made by {NEW_FILE}"
        raise ConfigError([ConfigIssue("launch.require_token", message, True)])
    return (
        f"no launch.token_file: whoever can connect to {address} can run code as this user in this "
        f"run; give every node the same secret file, made by {NEW_FILE}"
    )


def _secret(path: Path) -> bytes:
    """Read a token.

    Raises:
        OSError: The file can't be read.
        ValueError: It is no secret.
    """
    # Asked of what was opened, so that nobody puts another file there in between; a FIFO is not
    # waited for.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("is not a file")
        if about.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"belongs to user {about.st_uid}; make a file of your own")
        if about.st_mode & 0o077:
            mode = stat.S_IMODE(about.st_mode)
            raise ValueError(f"others can read or write it (mode {mode:04o}); use chmod 600")
        content = file.read(_MOST + 1).strip()
    if not _LEAST <= len(content) <= _MOST:
        size = "empty" if not content else f"{len(content)} bytes"
        raise ValueError(
            f"it is {size}, and a token has from {_LEAST} to {_MOST}; make it by {NEW_FILE}"
        )
    return content
