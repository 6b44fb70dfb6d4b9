"""Describes failures of ranks in plain words, for the console and the page of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_PEER_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)
"""Errors of gloo and NCCL that only report a lost connection to another rank."""
LOST_PEER = "lost the connection to a rank that had ended"


def failure_reason(failure: Mapping[str, Any]) -> Any:
    """Return the reason of a failure, or a plain sentence if a rank only lost its connection.

    Args:
        failure: Content of ``crash.json``, or the event of a failure.
    """
    reason = failure.get("reason")
    return LOST_PEER if failure.get("kind") == "connection" else reason


def _plain_reason(reason: str) -> str:
    """Return the reason of a failure, or a plain sentence if it follows from another failure."""
    return LOST_PEER if _PEER_GONE.search(reason) else reason


def failure_place(failure: Mapping[str, Any], coords: Mapping[str, int]) -> str:
    """Return a failed rank's mesh coordinates, node and step, as in ``dp=1, on node-0, in step 8``.

    Args:
        failure: Content of ``crash.json``, or the fields of a report.
        coords: Coordinates of the rank on mesh axes with more than one rank.
    """
    step, doing = failure.get("step"), failure.get("doing")
    parts = [" ".join(f"{axis}={index}" for axis, index in coords.items())] if coords else []
    if failure.get("host"):
        parts.append(f"on {failure['host']}")
    if isinstance(step, int):
        after = f"{doing or ''} after step {step}".strip()
        parts.append(f"in step {step + 1}" if doing == "stepping" else after)
    elif doing:
        parts.append(f"{doing}, before the first step")
    return ", ".join(parts)


def fold_ranks(followers: Iterable[tuple[int, str]], *, first: str) -> list[str]:
    """Group ranks that failed later by reason, as in ``ranks 1-7: the same``.

    Args:
        followers: Rank and reason of each failure after the first.
        first: Reason of the first failure.
    """
    groups: dict[str, list[int]] = {}
    for rank, reason in followers:
        groups.setdefault(_plain_reason(reason), []).append(rank)
    return [
        f"{plain_ranks(ranks)}: {'the same' if reason == first else reason}"
        for reason, ranks in groups.items()
    ]


def plain_ranks(numbers: list[int]) -> str:
    """Return ranks as text, with consecutive ones as a range: ``ranks 0, 4-7``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
