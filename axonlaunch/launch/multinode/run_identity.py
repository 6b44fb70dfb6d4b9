"""How the members of a run learn its random name from the one that listens.

All they sign carries the name, so that nothing which an earlier run with the same token wrote is
taken for this one's. An old name put back by a stranger leads to messages that lack a member's
nonce (``handshake``), which are refused there.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import torch.distributed as dist

from axonlaunch.comm.authenticated_store import Channel
from axonlaunch.system.authentication import Credentials, ForgedMessageError

_NAME = "run"


def publish_identity(store: dist.Store, key: bytes) -> Credentials:
    """Name the run; the process that listens does.

    Args:
        store: Under what is this launcher's job alone.
        key: Derived from the token.
    """
    channel = _announcements(store, key)
    run = secrets.token_hex(8)
    channel.put(_NAME, run)
    return Credentials(key=key, run=run, sender="")


def keep_identity(store: dist.Store, credentials: Credentials) -> None:
    """Keep the run's name where others read it; write it again where it was deleted.

    Raises:
        ForgedMessageError: A stranger wrote over it: nobody can join any more.
    """
    channel = _announcements(store, credentials.key)
    if not channel.check([_NAME]):
        channel.put(_NAME, credentials.run)
        return
    with suppress(dist.DistStoreError):  # deleted since
        if channel.get(_NAME) != credentials.run:
            raise ForgedMessageError(f"{_NAME}: names another run")


def learn(store: dist.Store, key: bytes, *, timeout_s: float) -> Credentials:
    """Wait for the run's name.

    Raises:
        TimeoutError: There is none in time.
        ForgedMessageError: It was not written by a holder of the token.
    """
    channel = _announcements(store, key)
    channel.wait(_NAME, timeout_s=timeout_s)
    return Credentials(key=key, run=str(channel.get(_NAME)), sender="")


def keys_of(store: dist.Store, credentials: Credentials, *names: str) -> dist.Store:
    """Return the part of a store that is a run's alone."""
    return dist.PrefixStore("/".join(("axonlaunch", credentials.run, *names)), store)


def _announcements(store: dist.Store, key: bytes) -> Channel:
    # A run's name is random, and so never that of an announcement.
    credentials = Credentials(key=key, run="announcement", sender="listener")
    return Channel(dist.PrefixStore("axonlaunch", store), credentials)
