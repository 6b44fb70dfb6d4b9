"""The user's cache folder, and files in it that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path


def cache_folder() -> Path:
    """Return what is ours of the user's cache, by the XDG base directory specification."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "axonlaunch"


def keep(file: Path, text: str) -> None:
    """Write a file of the cache at once; where the folder can't be written, none is kept."""
    partial = file.with_suffix(f".{os.getpid()}")  # of its own, for several may write at once
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return a hash of every file of this package, which its version does not distinguish."""
    package = Path(__file__).resolve().parent.parent
    digest = sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
