"""How far each rank of a node has come, in memory that its processes share.

A rank writes a time, a step and what it is doing; whoever supervises it reads. Nothing waits.
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
    """What a rank was last seen to do.

    Attributes:
        at: ``time.monotonic()``, which processes of a node share.
        step: Optimizer steps done; None before training.
        phase: One of ``PHASES``.
    """

    at: float
    step: int | None
    phase: str


class HeartbeatTable:
    """The heartbeats of a node's ranks, each at its own index."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    @classmethod
    def of(cls, ranks: int, context: ForkServerContext | None = None) -> HeartbeatTable:
        """Allocate a table for some ranks; without a context, for threads of this process alone."""
        size = _FIELDS * ranks
        heartbeats = cls([0.0] * size if context is None else context.RawArray("d", size))
        for index in range(ranks):
            heartbeats.report_phase(index, "starting", step=None)
        return heartbeats

    def report_phase(self, index: int, phase: str, *, step: int | None) -> None:
        """Record what a rank begins to do now."""
        start = _FIELDS * index
        self._shared[start + 1] = -1.0 if step is None else float(step)
        self._shared[start + 2] = float(PHASES.index(phase))
        self._shared[start] = time.monotonic()

    def read(self, index: int) -> Heartbeat:
        """Return the last record of a rank."""
        at, step, phase = self._shared[_FIELDS * index : _FIELDS * (index + 1)]
        return Heartbeat(at, None if step < 0 else int(step), PHASES[int(phase)])
