"""Recognizes errors that only say that a peer was gone, as gloo and NCCL word them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PEER_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)
LOST_PEER = "lost the connection to a rank that had ended"


def failure_reason(failure: Mapping[str, Any]) -> Any:
    """Return why the first rank failed: in one sentence if it only lost its connection.

    Args:
        failure: The content of ``crash.json``, or an event of a failure.
    """
    reason = failure.get("reason")
    return LOST_PEER if failure.get("kind") == "connection" else reason


def plain_reason(reason: str) -> str:
    """Return the reason of a failure; one sentence for all that follow from another failure."""
    return LOST_PEER if _PEER_GONE.search(reason) else reason
