"""The user's home and cache folders, and atomic writing of files in the latter."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path


def home_folder() -> Path:
    """Return the user's home folder; ``/`` for a user without one, as Docker sets HOME."""
    try:
        return Path.home()
    except RuntimeError:  # HOME is not set, and the user has no entry in /etc/passwd
        return Path("/")


def cache_folder() -> Path:
    """Return this package's folder in the user's cache (XDG base directory specification)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else home_folder() / ".cache"
    return base / "axonlaunch"


def keep(file: Path, text: str) -> None:
    """Write a cache file atomically; do nothing if the folder can't be written."""
    partial = file.with_suffix(f".{os.getpid()}")  # unique, because several processes may write
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return a hash of this package's source files, which changes more often than its version."""
    package = Path(__file__).resolve().parents[2]
    digest = sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
