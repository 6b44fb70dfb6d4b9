"""Which rank the others wait for, and what it does with its time.

A thread looks at the training thread some times a second, as a sampling profiler does, so that any
strategy is seen alike; it works where the host computes. On an accelerator it tells nothing.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
from types import FrameType

import torch
import torch.distributed as dist

from axonlaunch.comm import World
from axonlaunch.comm.backend import Backend
from axonlaunch.events import Slowest
from axonlaunch.whereabouts import state, waits

_INTERVAL_S = 0.02
_ENOUGH = 25
"""Samples of a rank from which shares are told; fewer are kept for the next time."""
_KINDS = ("data", "compute", "wait")
_NAME_BYTES = 64


class _Samples:
    """What this rank's training thread was seen to do.

    Attributes:
        phase: What the trainer says that it does: ``reading`` is time for data.
        counts: Samples of each kind.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.counts = [0] * len(_KINDS)
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="stragglers", daemon=True)
        self._sampler.start()

    def close(self) -> None:
        """Sample no more."""
        self._over.set()
        self._sampler.join()

    def _sample(self) -> None:
        pid = os.getpid()
        while not self._over.wait(_INTERVAL_S):
            kind = ""
            if self.phase == "reading":
                kind = "data"
            elif self.phase == "stepping":
                asleep = state(pid, self._native) == "S"
                files = _files(sys._current_frames().get(self._thread))
                kind = "wait" if waits(files, is_asleep=asleep) else "compute"
            if kind:
                self.counts[_KINDS.index(kind)] += 1


def _files(frame: FrameType | None) -> list[str]:
    """Return the files of a frame and of its two callers."""
    found: list[str] = []
    while frame is not None and len(found) < 3:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return found


class Stragglers:
    """Finds the slowest rank of a world."""

    def __init__(self, world: World) -> None:
        """Begin to watch this rank, where it has others and the host computes.

        Every rank makes one.
        """
        self._samples: _Samples | None = None
        if world.world_size == 1 or world.backend is not Backend.GLOO:
            return
        self._samples = _Samples()
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        names = _gathered(torch.tensor(list(name), dtype=torch.uint8))
        self._machines = [bytes(one.tolist()).decode(errors="replace").strip() for one in names]

    def note(self, phase: str) -> None:
        """Take what the trainer begins to do."""
        if self._samples is not None:
            self._samples.phase = phase

    def slowest(self) -> Slowest | None:
        """Return the rank that worked most since it was last told; every rank calls this.

        What it costs is the share of time by which it works longer than the median of the others.
        None while too little was seen.
        """
        if self._samples is None:
            return None
        counts = _gathered(torch.tensor(self._samples.counts, dtype=torch.float64))
        if min(float(one.sum()) for one in counts) < _ENOUGH:
            return None
        self._samples.counts = [0] * len(_KINDS)
        shares = [dict(zip(_KINDS, (one / one.sum()).tolist(), strict=True)) for one in counts]
        worked = [1 - one["wait"] for one in shares]
        rank = max(range(len(worked)), key=worked.__getitem__)
        cost = worked[rank] - statistics.median(worked[:rank] + worked[rank + 1 :])
        told = {kind: round(share, 3) for kind, share in shares[rank].items()}
        return Slowest(rank=rank, machine=self._machines[rank], cost=round(cost, 3), **told)

    def close(self) -> None:
        """Watch no more."""
        if self._samples is not None:
            self._samples.close()


def _gathered(own: torch.Tensor) -> list[torch.Tensor]:
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    return told
