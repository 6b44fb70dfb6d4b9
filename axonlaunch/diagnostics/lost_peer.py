"""Recognizes errors of gloo and NCCL that only report a lost connection to another rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PEER_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)
LOST_PEER = "lost the connection to a rank that had ended"


def failure_reason(failure: Mapping[str, Any]) -> Any:
    """Return the reason of a failure, or a plain sentence if a rank only lost its connection.

    Args:
        failure: Content of ``crash.json``, or the event of a failure.
    """
    reason = failure.get("reason")
    return LOST_PEER if failure.get("kind") == "connection" else reason


def plain_reason(reason: str) -> str:
    """Return the reason of a failure, or a plain sentence if it follows from another failure."""
    return LOST_PEER if _PEER_GONE.search(reason) else reason
