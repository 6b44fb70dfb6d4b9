"""How the members of a run on several nodes join each other, over torch's store.

What another than the named member wrote is refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from axonlaunch.comm.authenticated_store import Channel
from axonlaunch.system.authentication import ForgedMessageError

_ANSWER_S = 10.0
"""Seconds in which the store answers that a key is there: whatever is read is written already."""


def member_name(member: int) -> str:
    """Return what a member signs as."""
    return f"member {member}"


def read_message(channel: Channel, name: str, sender: str) -> Any:
    """Read a message that stood there a moment ago.

    Raises:
        ForgedMessageError: Another wrote it, or deleted it since.
    """
    try:
        return channel.get(name, sender=sender)
    except dist.DistStoreError as error:
        raise ForgedMessageError(f"{name}: was deleted") from error


def heartbeat_message(
    count: int, *, reports: Sequence[str] = (), is_stopping: bool = False
) -> dict[str, Any]:
    """Return what a member's heartbeat says.

    Args:
        count: Of its heartbeats; a handshake sends the first.
        reports: Its failures.
        is_stopping: Whether it was asked to stop.
    """
    return {"count": count, "reports": [*reports], "is_stopping": is_stopping}


def handshake(
    channel: Channel,
    *,
    member: int,
    members: int,
    unit: Literal["rank", "node"],
    about: Any,
    timeout_s: float,
    announce: Callable[[str], None],
    confirm: Callable[[], None],
) -> tuple[list[Any] | None, list[str]]:
    """Wait until every member has joined.

    Args:
        channel: Where they meet. From now on none of its operations waits for long: what a
            stranger deletes is not waited for.
        member: Which one this is.
        members: How many there are.
        unit: What a member is, for the text of ``announce``.
        about: What this one says of itself.
        timeout_s: How long member 0 waits for the others.
        announce: Takes a line for the user.
        confirm: Raises where the others can't come any more; member 0 asks again and again.

    Returns:
        What each said of itself, on member 0 alone, and the nonces for ``Coordinator``.

    Raises:
        TimeoutError: Some did not come; the message says which.
        ForgedMessageError: Another than the member wrote what it said.
    """
    channel.store.set_timeout(timedelta(seconds=_ANSWER_S))
    nonce = secrets.token_hex(16)
    channel.put(f"heartbeat/{member}", heartbeat_message(0))
    channel.put(f"joined/{member}", {"nonce": nonce, "about": about})
    if member:
        return None, [nonce]
    names = {f"joined/{other}": member_name(other) for other in range(members)}
    deadline, announce_at = time.monotonic() + timeout_s, time.monotonic() + 2.0
    while not channel.check([*names]):
        missing = [other for other, name in enumerate(names) if not channel.check([name])]
        if 0 in missing:
            raise ForgedMessageError("joined/0: a stranger deleted it")
        if time.monotonic() > deadline:
            raise TimeoutError(", ".join(map(str, missing)))
        if time.monotonic() > announce_at and missing:
            plural = "s" if len(missing) > 1 else ""
            absent = f"{unit}{plural} {', '.join(map(str, missing))}"
            announce(f"waiting for {len(missing)} of {members} {unit}s to join: {absent}")
            announce_at = deadline
        confirm()
        time.sleep(0.05)
    joined = [read_message(channel, name, sender) for name, sender in names.items()]
    return [content["about"] for content in joined], [content["nonce"] for content in joined]
