"""Marks files that this user wrote, and recognizes them.

A mark is an HMAC of the content, the file's folder and the working folder, with a key that only
this user can read. A file that another person wrote, changed, or copied with its mark to another
folder does not have the right mark.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from pathlib import Path

from axonlaunch.system.storage.cache import cache_folder
from axonlaunch.system.storage.files import create_file, open_regular, read_text, replace_text

MARK = ".mark"
"""Suffix of the file with a mark, in the folder of the marked file."""
_KEY = "own-files.key"
_BYTES = 32


def mark_trusted(file: Path, text: str) -> None:
    """Write the mark of a file that this user has written; do nothing without a cache folder.

    Args:
        file: Path of the file.
        text: Content of the file.

    Raises:
        OSError: The mark can't be written.
    """
    key = _key() or _new_key()
    if key is not None:
        replace_text(_mark_of(file), _digest(key, file, text))


def is_trusted(file: Path, text: str) -> bool:
    """Return whether a file has the mark that ``mark_trusted`` gave it.

    That requires the same user, path, content and working folder.

    Args:
        file: Path of the file.
        text: Content of the file.
    """
    try:
        key, mark = _key(), read_text(_mark_of(file), at_most=2 * _BYTES)
        is_of_user = file.stat().st_uid == os.geteuid()
    except (OSError, ValueError):
        return False
    return key is not None and is_of_user and hmac.compare_digest(mark, _digest(key, file, text))


def _mark_of(file: Path) -> Path:
    return file.with_name(f".{file.name}{MARK}")


def _digest(key: bytes, file: Path, text: str) -> str:
    # Code that the file names is looked up in the working folder.
    marked = json.dumps([str(file.parent.resolve()), file.name, str(Path.cwd()), text])
    return hmac.digest(key, marked.encode(), "sha256").hex()


def _key() -> bytes | None:
    """Return this user's key; None if there is none, or if another user can read or write it."""
    try:
        with open_regular(cache_folder() / _KEY) as stream:
            status = os.fstat(stream.fileno())
            key = stream.read(_BYTES + 1)
    except OSError:
        return None
    is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return key if is_private and len(key) == _BYTES else None


def _new_key() -> bytes | None:
    """Create this user's key; None if the cache folder can't be written or has another key."""
    file = cache_folder() / _KEY
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with create_file(file, mode=0o600) as stream:
            stream.write(secrets.token_bytes(_BYTES))
    except OSError:  # another process of this user may just have created it
        pass
    return _key()
