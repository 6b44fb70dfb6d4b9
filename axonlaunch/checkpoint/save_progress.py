"""What the other ranks have written of a save, for who waits for them.

A rank that has written its part waits in a collective for the slowest: it moves as they do. Nothing
here says how much is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import torch.distributed as dist

_INTERVAL_S = 1.0


class SharedProgress:
    """A counter of all ranks' writes, and a thread that calls ``moved`` when it has grown.

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
        """Prepare to count.

        Args:
            store: That all ranks share.
            key: Of this save, the same on all.
            moved: Called by a thread of its own whenever a rank, this one included, wrote.
            interval_s: How often it looks; None: each second.
        """
        self._store = store
        self._key = key
        self._moved = moved
        self._interval_s = _INTERVAL_S if interval_s is None else interval_s
        self._written = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="save progress", daemon=True)

    def wrote(self) -> None:
        """Count a piece that this rank wrote."""
        self._written += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(self._interval_s)  # not for ever: the store's node may be gone

    def _follow(self) -> None:
        shared, seen = 0, 0
        while not self._over.wait(self._interval_s):
            written = self._written
            try:
                total = self._store.add(self._key, written - shared)
            except RuntimeError:  # the store is gone; the save fails by its own collectives
                return
            shared = written
            if total != seen and not self._over.is_set():
                self._moved()
            seen = total
