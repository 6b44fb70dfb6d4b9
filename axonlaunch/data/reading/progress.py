"""Records in shared memory which sample each worker process reads, for an error about the process.

A worker that is killed or hangs can't say what it does.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_SLOT = 256
_HEADER = struct.Struct("<d?H")
"""Time at which the sample began, whether it is being read, and the length of its name."""


@dataclass(frozen=True)
class WorkerProgress:
    """The last record of a worker process.

    Attributes:
        sample: Name of the last sample that it began; empty: none yet.
        is_busy: Whether it works on a task.
        seconds: Time since the sample began.
    """

    sample: str
    is_busy: bool
    seconds: float


class ReadingStoppedError(Exception):
    """The rank needs no more samples."""


class ProgressTable:
    """The progress of worker processes that are forked after its creation, without locks."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, _SLOT * count + 1)
        self._stop_at = _SLOT * count

    def stop(self) -> None:
        """Tell the workers to begin no more samples."""
        self._memory[self._stop_at] = 1

    @property
    def is_stopped(self) -> bool:
        """Whether the workers begin no more samples."""
        return bool(self._memory[self._stop_at])

    def write(self, worker: int, sample: str, *, is_busy: bool) -> None:
        """Record that a worker begins a sample, or that it waits for a task."""
        name = sample.encode(errors="replace")[: _SLOT - _HEADER.size]
        start = _SLOT * worker
        _HEADER.pack_into(self._memory, start, time.monotonic(), is_busy, len(name))
        start += _HEADER.size
        self._memory[start : start + len(name)] = name

    def read(self, worker: int) -> WorkerProgress:
        """Return the last record of a worker."""
        start = _SLOT * worker
        at, is_busy, length = _HEADER.unpack_from(self._memory, start)
        start += _HEADER.size
        name = self._memory[start : start + length].decode(errors="replace")
        return WorkerProgress(name, is_busy, time.monotonic() - at)


_this_worker: tuple[ProgressTable, int] | None = None


def record_in(table: ProgressTable, worker: int) -> None:
    """Make this process record its progress as a worker."""
    global _this_worker
    _this_worker = table, worker


def begin_sample(name: str) -> None:
    """Record that this process begins to read a sample; do nothing in a process without a table.

    Raises:
        ReadingStoppedError: The rank needs no more samples.
    """
    if _this_worker is not None:
        table, worker = _this_worker
        if table.is_stopped:
            raise ReadingStoppedError
        table.write(worker, name, is_busy=True)


def end_task() -> None:
    """Record that this process has finished a task."""
    if _this_worker is not None:
        table, worker = _this_worker
        table.write(worker, table.read(worker).sample, is_busy=False)
