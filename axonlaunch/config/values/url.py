"""Distinguishes URLs, which are opened by fsspec, from paths on this node."""

from __future__ import annotations

import os

SCHEME = "://"


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return SCHEME in path


def shortened(path: str) -> str:
    """Return a path relative to the working folder if it is inside; leave URLs unchanged."""
    if is_url(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
