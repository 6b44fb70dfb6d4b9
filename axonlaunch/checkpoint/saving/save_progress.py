"""Reports the writing progress of other ranks to a rank that waits for them in a save.

A rank that has written its part waits in a collective for the slowest rank, and counts as active
while others write. The remaining amount is not known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import torch.distributed as dist

_INTERVAL_S = 1.0


class SharedProgress:
    """Shared counter of all ranks' writes, with a thread that calls ``moved`` when it grows.

    Example:
        with SharedProgress(store, "save/1", moved=beat) as progress:
            ...  # progress.wrote() after each piece, on every rank
    """

    def __init__(
        self,
        store: dist.Store,
        key: str,
        *,
        moved: Callable[[], object],
        interval_s: float | None = None,
    ) -> None:
        """Initialize the counter; entering the context starts the thread.

        Args:
            store: Store shared by all ranks.
            key: Key of this save, the same on all ranks.
            moved: Called from a separate thread after any rank, including this one, has written.
            interval_s: Polling interval in seconds; None polls every second.
        """
        self._store = store
        self._key = key
        self._moved = moved
        self._interval_s = _INTERVAL_S if interval_s is None else interval_s
        self._written = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="save progress", daemon=True)

    def wrote(self) -> None:
        """Count one piece written by this rank."""
        self._written += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(self._interval_s)  # limited, because the store's node may be gone

    def _follow(self) -> None:
        shared, previous = 0, 0
        while not self._over.wait(self._interval_s):
            written = self._written
            try:
                total = self._store.add(self._key, written - shared)
            except RuntimeError:  # the store is gone; the save fails by its own collectives
                return
            shared = written
            if total != previous and not self._over.is_set():
                self._moved()
            previous = total
