"""Finds the rank that the others wait for, and how it spends its time.

On a CPU, a thread samples the training thread several times per second like a sampling profiler,
which works for any strategy. Time in which a rank is ready but gets no core is counted separately,
because other programs on the node cause it. On a GPU, CUDA events measure the blocks of the model
(``block_times``).
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from axonlaunch.comm import World
from axonlaunch.comm.backend import Backend
from axonlaunch.diagnostics.block_times import BlockTimes
from axonlaunch.diagnostics.wait_detection import waits
from axonlaunch.events import RankTimes, Straggler
from axonlaunch.system.processes.process_state import WatchedThread, queued_s

_INTERVAL_S = 0.04
_ENOUGH_S = 0.5
"""Minimum of sampled seconds for a report; with fewer, sampling continues until the next report."""
_KINDS = ("data", "compute", "wait")
_NAME_BYTES = 64


@dataclass(frozen=True)
class Shares:
    """How a rank spent its time, as fractions that sum to 1.

    Attributes:
        data: Fraction spent waiting for data.
        compute: Fraction spent computing.
        wait: Fraction spent waiting for other ranks.
        starved: Fraction in which it was ready to run but had no core.
    """

    data: float
    compute: float
    wait: float
    starved: float

    @classmethod
    def of(cls, seconds: Sequence[float], *, queued_s: float) -> Self:
        """Return the shares of sampled seconds of each of ``_KINDS``.

        A thread that waits for a core is not asleep, so samples count it as computing. Queued time
        is therefore subtracted: 0.5 s of computing with 0.2 s queued is 0.3 s of computing.
        """
        data, compute, wait = (part / sum(seconds) for part in seconds)
        starved = min(queued_s / sum(seconds), compute)
        return cls(data, compute - starved, wait, starved)


def slowest_of(ranks: Sequence[Shares], nodes: Sequence[str]) -> Straggler:
    """Return the rank that worked most: it computed or waited for data instead of other ranks.

    Args:
        ranks: Shares of two or more ranks.
        nodes: Host name of each rank.
    """
    worked = [share_of.data + share_of.compute for share_of in ranks]
    rank = max(range(len(worked)), key=worked.__getitem__)
    cost = worked[rank] - statistics.median(worked[:rank] + worked[rank + 1 :])
    shares = {kind: round(share, 3) for kind, share in asdict(ranks[rank]).items()}
    return Straggler(rank=rank, host=nodes[rank], cost=round(cost, 3), **shares)


class _Samples:
    """Samples of this rank's training thread.

    Attributes:
        seconds: Sampled seconds of each of ``_KINDS``.
        queued_s: Part of these seconds in which the thread waited for a core.
    """

    enough_s = _ENOUGH_S

    def __init__(self) -> None:
        self._phase = ""
        self.clear()
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._watched = WatchedThread(self._native)
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="stragglers", daemon=True)
        self._sampler.start()

    def clear(self) -> None:
        """Reset all seconds to 0."""
        self.seconds = [0.0] * len(_KINDS)
        self.queued_s = 0.0

    def note(self, phase: str) -> None:
        """Record the phase that the trainer begins; ``reading`` counts as waiting for data."""
        self._phase = phase

    def seconds_by_kind(self) -> list[float]:
        """Return the sampled seconds of each kind, and the seconds without a core."""
        return [*self.seconds, self.queued_s]

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._sampler.join()
        self._watched.close()

    def _sample(self) -> None:
        sampled, (_, queued) = time.perf_counter(), self._watched.look()
        while not self._over.wait(_INTERVAL_S):
            letter, queued_now = self._watched.look()
            kind, now = self._kind(is_asleep=letter == "S"), time.perf_counter()
            if kind:
                self.seconds[_KINDS.index(kind)] += now - sampled
                self.queued_s += queued_now - queued
            sampled, queued = now, queued_now

    def _kind(self, *, is_asleep: bool) -> str:
        """Return what the training thread does; empty outside of steps."""
        if self._phase == "reading":
            return "data"
        if self._phase != "stepping":
            return ""
        files = files_of(sys._current_frames().get(self._thread))
        return "wait" if waits(files, is_asleep=is_asleep) else "compute"


def files_of(frame: FrameType | None) -> list[str]:
    """Return the files of a frame and of its two callers."""
    files: list[str] = []
    while frame is not None and len(files) < 3:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files


class Stragglers:
    """Finds the slowest rank of a world."""

    def __init__(self, world: World, *, blocks: Sequence[nn.Module] = ()) -> None:
        """Start measuring this rank, if the world has several ranks and all can be measured.

        This is a collective call of all ranks.

        Args:
            world: World of the ranks.
            blocks: This rank's blocks of the model.
        """
        self._times: _Samples | BlockTimes | None = None
        if world.world_size == 1:
            return
        has_device = world.backend is Backend.NCCL and world.device.type == "cuda"
        if not has_device and world.backend is not Backend.GLOO:
            return
        # On a CPU, queued time is required to tell a slow rank from a busy node.
        can_measure = (
            bool(blocks) if has_device else queued_s(threading.get_native_id()) is not None
        )
        if not all(map(bool, _gather_rows(torch.tensor([int(can_measure)])))):
            return
        self._times = BlockTimes(blocks) if has_device else _Samples()
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        names = _gather_rows(torch.tensor(list(name), dtype=torch.uint8))
        self._nodes = [
            bytes(encoded.tolist()).decode(errors="replace").strip() for encoded in names
        ]

    def note(self, phase: str) -> None:
        """Record the phase that the trainer begins."""
        if self._times is not None:
            self._times.note(phase)

    def compare(self, *, step: int) -> tuple[RankTimes, Straggler] | None:
        """Return how all ranks spent their time since the last report, and the slowest rank.

        This is a collective call of all ranks. Returns None if too little time was measured.

        Args:
            step: Number of optimizer steps done.
        """
        if self._times is None:
            return None
        local = torch.tensor(self._times.seconds_by_kind(), dtype=torch.float64)
        samples = [sample.tolist() for sample in _gather_rows(local)]
        if min(sum(seconds) for *seconds, _ in samples) < self._times.enough_s:
            return None
        self._times.clear()
        shares = [Shares.of(seconds, queued_s=queued) for *seconds, queued in samples]
        by_kind = {
            kind: tuple(round(getattr(share, kind), 2) for share in shares)
            for kind in (*_KINDS, "starved")
        }
        times = RankTimes(step=step, hosts=tuple(self._nodes), **by_kind)
        return times, slowest_of(shares, self._nodes)

    def close(self) -> None:
        """Stop measuring."""
        if self._times is not None:
            self._times.close()


def _gather_rows(local: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return gathered
