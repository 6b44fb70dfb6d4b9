"""Joins the members of a run on several nodes over torch's store.

Messages that were not written by the named member are rejected.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.system.authentication import ForgedMessageError

_ANSWER_S = 10.0
"""Timeout of store operations in seconds. Keys are read only after they were written."""


class EarlierStartError(ForgedMessageError):
    """A message is for an earlier start of this member, whose place in the attempt is taken."""


def member_name(member: int) -> str:
    """Return the sender name of a member."""
    return f"member {member}"


def read_message(channel: Channel, name: str, sender: str) -> Any:
    """Read a message whose key exists.

    Raises:
        ForgedMessageError: Another sender wrote the message, or it was deleted.
    """
    try:
        return channel.get(name, sender=sender)
    except dist.DistStoreError as error:
        raise ForgedMessageError(f"{name}: was deleted") from error


def heartbeat_message(
    count: int, *, reports: Sequence[str] = (), is_stopping: bool = False
) -> dict[str, Any]:
    """Return the content of a member's heartbeat.

    Args:
        count: Number of this heartbeat; the handshake sends number 0.
        reports: Failure reports of the member.
        is_stopping: Whether the member received a stop request.
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
        channel: Channel between the members. Its timeout becomes short, so that deleted keys do not
            block it.
        member: Number of this member.
        members: Number of members.
        unit: Word for a member in the text of ``announce``, for example "rank".
        about: Description of this member for member 0.
        timeout_s: Seconds that member 0 waits for the others.
        announce: Receives a line for the user.
        confirm: Function that member 0 calls repeatedly; it raises if others can't join any more.

    Returns:
        Descriptions of all members, only on member 0, and the nonces for ``Coordinator``.

    Raises:
        TimeoutError: Some members did not join; the message lists them.
        ForgedMessageError: A message was not written by the member.
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
