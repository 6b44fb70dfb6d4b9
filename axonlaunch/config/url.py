"""What distinguishes a URL, which fsspec reaches, from a folder of this node."""

from __future__ import annotations

SCHEME = "://"


def is_url(path: str) -> bool:
    """Return whether a path that a user wrote is a URL."""
    return SCHEME in path
