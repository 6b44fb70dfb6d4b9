"""Times in which this process was stopped, which do not count as time without progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_S = 5.0
"""Seconds of a wait, usually 0.1, that show that this process was stopped."""


class Pauses:
    """Pauses of this process, by Ctrl-Z or with a suspended SLURM job, for example.

    They are noted during short waits. Other work may take long too, such as writing to a slow
    disk, and is no pause.
    """

    def __init__(self) -> None:
        """Begin without pauses."""
        self._pauses: list[tuple[float, float]] = []

    def watch(self, wait: Callable[[], T]) -> T:
        """Call a function that waits for a short time, note a pause, and return its result."""
        began = time.monotonic()
        result = wait()
        ended = time.monotonic()
        if ended - began > PAUSE_S:
            self._pauses.append((began, ended))
        return result

    def running_since(self, start: float) -> float:
        """Return the seconds since ``start``, a time of ``time.monotonic()``, without pauses."""
        paused = sum(max(0.0, end - max(begin, start)) for begin, end in self._pauses)
        return time.monotonic() - start - paused
