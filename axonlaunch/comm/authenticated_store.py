"""torch's store, where a member of a run writes signed messages and reads no others.

``Channel`` carries our own messages; ``AuthenticatedStore`` is a store for torch, which exchanges
gloo's addresses and NCCL's identifier over it. Neither hides anything from who can connect.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from axonlaunch.system.authentication import Credentials, ForgedMessageError


class Channel:
    """Messages under the keys of a store.

    Attributes:
        store: Where they stand.
        credentials: What this member signs with.
    """

    def __init__(self, store: dist.Store, credentials: Credentials) -> None:
        self.store = store
        self.credentials = credentials

    def put(self, name: str, content: Any) -> None:
        """Write a message; it replaces the one of that name."""
        self.store.set(name, self.credentials.seal(name, content))  # type: ignore[arg-type]  # bytes

    def get(self, name: str, *, sender: str | None = None) -> Any:
        """Read a message, once there is one.

        Raises:
            ForgedMessageError: A stranger wrote it, or another member than ``sender``.
        """
        return self.credentials.open(name, self.store.get(name), sender=sender)

    def get_each(self, senders: dict[str, str]) -> list[Any | None]:
        """Read messages, once there are all; None for each that is forged.

        Args:
            senders: Who must have written which.
        """
        sealed = self.store.multi_get([*senders]) if senders else []
        contents: list[Any | None] = []
        for (name, sender), text in zip(senders.items(), sealed, strict=True):
            try:
                contents.append(self.credentials.open(name, text, sender=sender))
            except ForgedMessageError:
                contents.append(None)
        return contents

    def check(self, names: Sequence[str]) -> bool:
        """Say whether something stands under each name; a stranger may have written it."""
        return self.store.check(list(names))

    def wait(self, name: str, *, timeout_s: float) -> None:
        """Wait until something stands under a name.

        Raises:
            TimeoutError: Nothing does in time.
        """
        try:
            self.store.wait([name], timedelta(seconds=timeout_s))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise TimeoutError(str(error)) from error


class AuthenticatedStore(dist.Store):
    """A store for torch's process groups, of whose values none comes from a stranger.

    Whoever hands it to torch must hold it too: C++ keeps the store but not its Python methods.
    Counters (``add``) are not authenticated: torch counts arrivals with them, and a wrong count
    ends or delays a barrier. ``append``, ``compare_set`` and queues are not supported.
    """

    def __init__(self, store: dist.Store, credentials: Credentials) -> None:
        super().__init__()
        self._channel = Channel(store, credentials)
        self._store: Any = store  # torch's stub leaves some of it out
        self.credentials = credentials
        self._clones: list[AuthenticatedStore] = []

    @property
    def underlying_store(self) -> dist.Store:
        """What carries the messages."""
        store: dist.Store = self._store
        return store

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._channel.put(key, base64.b64encode(content).decode())

    def get(self, key: str) -> bytes:
        """Read a value, once there is one.

        Raises:
            ForgedMessageError: A stranger wrote it.
        """
        content = self._channel.get(key)
        if not isinstance(content, str):
            raise ForgedMessageError(f"{key}: is no value")
        return base64.b64decode(content)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values, once there are all."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until something stands under each key; reading it says whether it is authentic."""
        self._store.wait(keys, self._store.timeout if timeout is None else timeout)

    def check(self, keys: list[str]) -> bool:
        """Say whether something stands under each key."""
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is not authenticated."""
        return int(self._store.add(key, value))

    def delete_key(self, key: str) -> bool:
        """Take a value away."""
        return bool(self._store.delete_key(key))

    def clone(self) -> AuthenticatedStore:
        """Return the same over a connection of its own, for torch's own threads."""
        self._clones.append(AuthenticatedStore(self._store.clone(), self.credentials))
        return self._clones[-1]
