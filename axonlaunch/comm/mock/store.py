"""A torch store for rank threads; waiting for a key gives the turn to another rank."""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import timedelta

import torch.distributed as dist

from axonlaunch.comm.errors import format_ranks
from axonlaunch.comm.mock.exchange import Exchange, here

# The methods are those of torch's Store and are documented there.
# ruff: noqa: D102


class _Keys:
    """Keys that a rank waits for."""

    def __init__(self, keys: Sequence[str], values: dict[str, bytes]) -> None:
        self._keys, self._values = keys, values

    @property
    def done(self) -> bool:
        return all(key in self._values for key in self._keys)

    def describe(self, finished: Set[int]) -> str:
        missing = [key for key in self._keys if key not in self._values]
        note = (
            f" ({format_ranks(sorted(finished))} finished without setting it)" if finished else ""
        )
        return f"store, waits for {', '.join(missing)}{note}"


class MockStore(dist.Store):
    """The store that the ranks of one mock world share."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._values: dict[str, bytes] = {}
        self._waiting: dict[int, _Keys] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for rank, keys in self._waiting.items():
            if keys.done:
                self._exchange.turns.wake([rank], keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        expected = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, b"") == expected:
            self.set(key, desired)
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    # Names under which C++ looks up these two methods.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        awaited = _Keys(keys, self._values)
        self._waiting[here.rank] = awaited
        self._exchange.turns.wait(here.rank, awaited)
        del self._waiting[here.rank]
