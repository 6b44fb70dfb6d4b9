"""Which rank the others wait for, and what it does with its time.

Where the host computes, a thread looks at the training thread some times a second, as a sampling
profiler does, so that any strategy is seen alike. A rank that is slow because it gets no core is
not a straggler of the run, but of its node: that time is counted apart. Ranks with a GPU each
measure their blocks by events (``block_times``).
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
from axonlaunch.system.process_state import WatchedThread, queued_s

_INTERVAL_S = 0.04
_ENOUGH_S = 0.5
"""Sampled seconds of a rank from which shares are reported; fewer are kept for the next time."""
_KINDS = ("data", "compute", "wait")
_NAME_BYTES = 64


@dataclass(frozen=True)
class Shares:
    """What a rank did with its time; the shares sum to 1.

    Attributes:
        data: Waited for data.
        compute: Computed.
        wait: Waited for other ranks.
        starved: Was ready to run, and the node gave it no core.
    """

    data: float
    compute: float
    wait: float
    starved: float

    @classmethod
    def of(cls, seconds: Sequence[float], *, queued_s: float) -> Self:
        """Return the shares of sampled seconds of each of ``_KINDS``.

        Whoever waits for a core is seen neither asleep nor waiting for others: that time is in what
        was taken for computing. 0.5 s of computing, 0.2 s of them queued, are 0.3 s of computing.
        """
        data, compute, wait = (part / sum(seconds) for part in seconds)
        starved = min(queued_s / sum(seconds), compute)
        return cls(data, compute - starved, wait, starved)


def slowest_of(ranks: Sequence[Shares], nodes: Sequence[str]) -> Straggler:
    """Return the rank that worked most, and what the others pay for that.

    Args:
        ranks: Each rank's shares, two or more.
        nodes: Their host names.
    """
    worked = [share_of.data + share_of.compute for share_of in ranks]
    rank = max(range(len(worked)), key=worked.__getitem__)
    cost = worked[rank] - statistics.median(worked[:rank] + worked[rank + 1 :])
    shares = {kind: round(share, 3) for kind, share in asdict(ranks[rank]).items()}
    return Straggler(rank=rank, host=nodes[rank], cost=round(cost, 3), **shares)


class _Samples:
    """What this rank's training thread was seen to do.

    Attributes:
        seconds: Sampled time of each of ``_KINDS``.
        queued_s: Of it, time in which the thread waited for a core.
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
        """Begin to count from nothing."""
        self.seconds = [0.0] * len(_KINDS)
        self.queued_s = 0.0

    def note(self, phase: str) -> None:
        """Take what the trainer says that it does: ``reading`` is time for data."""
        self._phase = phase

    def seconds_by_kind(self) -> list[float]:
        """Return the sampled seconds of each kind, and those without a core."""
        return [*self.seconds, self.queued_s]

    def close(self) -> None:
        """Sample no more."""
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
        """Return what the training thread does; empty for what is not part of a step."""
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
        """Begin to watch this rank, if there are others and the system shows what a rank does.

        Every rank makes one.

        Args:
            world: The ranks.
            blocks: This rank's of the model.
        """
        self._times: _Samples | BlockTimes | None = None
        if world.world_size == 1:
            return
        has_device = world.backend is Backend.NCCL and world.device.type == "cuda"
        if not has_device and world.backend is not Backend.GLOO:
            return
        # Without the other, who is slow could be the nodes' doing, and nobody could say.
        can_tell = bool(blocks) if has_device else queued_s(threading.get_native_id()) is not None
        if not all(map(bool, _gather_rows(torch.tensor([int(can_tell)])))):
            return
        self._times = BlockTimes(blocks) if has_device else _Samples()
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        names = _gather_rows(torch.tensor(list(name), dtype=torch.uint8))
        self._nodes = [
            bytes(encoded.tolist()).decode(errors="replace").strip() for encoded in names
        ]

    def note(self, phase: str) -> None:
        """Take what the trainer begins to do."""
        if self._times is not None:
            self._times.note(phase)

    def compare(self, *, step: int) -> tuple[RankTimes, Straggler] | None:
        """Return what all ranks did since the last report, and who worked most; all call this.

        What the slowest costs is the share of time by which it works longer than the median of the
        others. None while too little was seen.

        Args:
            step: Optimizer steps done.
        """
        if self._times is None:
            return None
        own = torch.tensor(self._times.seconds_by_kind(), dtype=torch.float64)
        seen = [sample.tolist() for sample in _gather_rows(own)]
        if min(sum(seconds) for *seconds, _ in seen) < self._times.enough_s:
            return None
        self._times.clear()
        shares = [Shares.of(seconds, queued_s=queued) for *seconds, queued in seen]
        by_kind = {
            kind: tuple(round(getattr(share, kind), 2) for share in shares)
            for kind in (*_KINDS, "starved")
        }
        times = RankTimes(step=step, hosts=tuple(self._nodes), **by_kind)
        return times, slowest_of(shares, self._nodes)

    def close(self) -> None:
        """Watch no more."""
        if self._times is not None:
            self._times.close()


def _gather_rows(own: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return gathered
