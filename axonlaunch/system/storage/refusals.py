"""Tells refusals of a remote storage from failures that may pass."""

from __future__ import annotations


def is_refusal(error: Exception) -> bool:
    """Return whether the same request will fail again: for lack of credentials, for example."""
    refusals = (PermissionError, FileNotFoundError, NotImplementedError, TypeError, ValueError)
    return isinstance(error, refusals) or "Credentials" in type(error).__name__
