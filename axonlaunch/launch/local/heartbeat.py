"""Records the progress of each rank of a node in shared memory.

A rank writes the time, its step and its current phase; its supervisor reads them. No lock is used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any

PHASES = ("starting", "building", "loading", "reading", "stepping", "evaluating", "saving", "done")
_FIELDS = 3


@dataclass(frozen=True)
class Heartbeat:
    """The last recorded progress of a rank.

    Attributes:
        at: Time of the record from ``time.monotonic()``, which is comparable across the processes
            of a node.
        step: Number of optimizer steps done; None before training.
        phase: One of ``PHASES``.
    """

    at: float
    step: int | None
    phase: str


class HeartbeatTable:
    """The heartbeats of a node's ranks, by local index."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    @classmethod
    def of(cls, ranks: int, context: ForkServerContext | None = None) -> HeartbeatTable:
        """Allocate a table for a number of ranks.

        Without a context the table is not shared: only threads of this process can use it.
        """
        size = _FIELDS * ranks
        heartbeats = cls([0.0] * size if context is None else context.RawArray("d", size))
        for index in range(ranks):
            heartbeats.report_phase(index, "starting", step=None)
        return heartbeats

    def report_phase(self, index: int, phase: str, *, step: int | None) -> None:
        """Record that a rank begins a phase now."""
        start = _FIELDS * index
        self._shared[start + 1] = -1.0 if step is None else float(step)
        self._shared[start + 2] = float(PHASES.index(phase))
        self._shared[start] = time.monotonic()

    def read(self, index: int) -> Heartbeat:
        """Return a rank's last record."""
        at, step, phase = self._shared[_FIELDS * index : _FIELDS * (index + 1)]
        return Heartbeat(at, None if step < 0 else int(step), PHASES[int(phase)])
