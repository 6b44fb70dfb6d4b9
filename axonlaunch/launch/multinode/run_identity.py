"""Distributes the random name of a run from the listening process to all members.

All signed messages contain the name, so messages of an earlier run with the same token are
rejected. If an attacker restores an old name, the messages lack the member's nonce and
``handshake`` rejects them.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import torch.distributed as dist

from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.system.authentication import Credentials, ForgedMessageError

_NAME = "run"


def publish_identity(store: dist.Store, key: bytes) -> Credentials:
    """Choose and publish the name of the run. The listening process calls this.

    Args:
        store: Part of the store that only this launcher's job uses.
        key: Key derived from the token.
    """
    channel = _announcements(store, key)
    run = secrets.token_hex(8)
    channel.put(_NAME, run)
    return Credentials(key=key, run=run, sender="")


def keep_identity(store: dist.Store, credentials: Credentials) -> None:
    """Check that the run's name is published, and write it again if it was deleted.

    Raises:
        ForgedMessageError: Another process has overwritten the name, so members can't join.
    """
    channel = _announcements(store, credentials.key)
    if not channel.check([_NAME]):
        channel.put(_NAME, credentials.run)
        return
    with suppress(dist.DistStoreError):  # deleted after the check
        if channel.get(_NAME) != credentials.run:
            raise ForgedMessageError(f"{_NAME}: names another run")


def learn(store: dist.Store, key: bytes, *, timeout_s: float) -> Credentials:
    """Wait for the run's name.

    Raises:
        TimeoutError: No name was published in time.
        ForgedMessageError: The name was not signed with the token.
    """
    channel = _announcements(store, key)
    channel.wait(_NAME, timeout_s=timeout_s)
    return Credentials(key=key, run=str(channel.get(_NAME)), sender="")


def keys_of(store: dist.Store, credentials: Credentials, *names: str) -> dist.Store:
    """Return the part of a store that only one run uses."""
    return dist.PrefixStore("/".join(("axonlaunch", credentials.run, *names)), store)


def _announcements(store: dist.Store, key: bytes) -> Channel:
    # Names of runs are random and so never equal to this name.
    credentials = Credentials(key=key, run="announcement", sender="listener")
    return Channel(dist.PrefixStore("axonlaunch", store), credentials)
