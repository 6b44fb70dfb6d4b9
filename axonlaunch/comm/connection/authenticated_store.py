"""A torch store through which members of a run exchange signed messages.

``Channel`` carries this program's messages. ``AuthenticatedStore`` is a store for torch, which
exchanges gloo's addresses and NCCL's identifier through it. Messages are signed, not encrypted.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from axonlaunch.system.authentication import Credentials, ForgedMessageError


class Channel:
    """Signed messages under the keys of a store.

    Attributes:
        store: Store that holds the messages.
        credentials: Credentials with which this member signs.
    """

    def __init__(self, store: dist.Store, credentials: Credentials) -> None:
        self.store = store
        self.credentials = credentials

    def put(self, name: str, content: Any) -> None:
        """Write a message; it replaces an existing one with the same name."""
        self.store.set(name, self.credentials.seal(name, content))  # type: ignore[arg-type]  # bytes

    def get(self, name: str, *, sender: str | None = None) -> Any:
        """Wait for a message and return its content.

        Raises:
            ForgedMessageError: The writer is not a member of the run, or is not ``sender``.
        """
        return self.credentials.open(name, self.store.get(name), sender=sender)

    def get_each(self, senders: dict[str, str]) -> list[Any | None]:
        """Wait for messages and return their contents; None for each forged message.

        Args:
            senders: Expected sender of each message by its name.
        """
        sealed = self.store.multi_get([*senders]) if senders else []
        contents: list[Any | None] = []
        for (name, sender), message in zip(senders.items(), sealed, strict=True):
            try:
                contents.append(self.credentials.open(name, message, sender=sender))
            except ForgedMessageError:
                contents.append(None)
        return contents

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all names exist; their messages may be forged."""
        return self.store.check(list(names))

    def wait(self, name: str, *, timeout_s: float) -> None:
        """Wait until a name exists.

        Raises:
            TimeoutError: The name still does not exist after the timeout.
        """
        try:
            self.store.wait([name], timedelta(seconds=timeout_s))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise TimeoutError(str(error)) from error


class AuthenticatedStore(dist.Store):
    """A store for torch's process groups that reads only values of members of the run.

    Keep a reference to it after passing it to torch, because C++ keeps the store without its Python
    methods. Counters (``add``) are not authenticated: torch counts arrivals with them, and a wrong
    count ends or delays a barrier. ``append``, ``compare_set`` and queues are not supported.
    """

    def __init__(self, store: dist.Store, credentials: Credentials) -> None:
        super().__init__()
        self._channel = Channel(store, credentials)
        self._store: Any = store  # torch's type stub is incomplete
        self.credentials = credentials
        self._clones: list[AuthenticatedStore] = []

    @property
    def underlying_store(self) -> dist.Store:
        """The store that carries the messages."""
        store: dist.Store = self._store
        return store

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._channel.put(key, base64.b64encode(content).decode())

    def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Raises:
            ForgedMessageError: The writer is not a member of the run.
        """
        content = self._channel.get(key)
        if not isinstance(content, str):
            raise ForgedMessageError(f"{key}: is not a value")
        return base64.b64decode(content)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values and return them."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; whether a value is authentic is checked when it is read."""
        self._store.wait(keys, self._store.timeout if timeout is None else timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is not authenticated, and return its value."""
        return int(self._store.add(key, value))

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether it existed."""
        return bool(self._store.delete_key(key))

    def clone(self) -> AuthenticatedStore:
        """Return a store with a separate connection; torch's threads need it."""
        self._clones.append(AuthenticatedStore(self._store.clone(), self.credentials))
        return self._clones[-1]
