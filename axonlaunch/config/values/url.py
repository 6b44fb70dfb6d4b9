"""Distinguishes URLs, which are opened by fsspec, from paths on this node."""

from __future__ import annotations

SCHEME = "://"


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return SCHEME in path
