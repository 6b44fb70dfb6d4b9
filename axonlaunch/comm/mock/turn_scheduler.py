"""Schedules rank threads: one runs at a time, until it has to wait for another.

The rank that has been ready longest runs next, so a run is the same every time. The states of
torch's random generators are switched together with the rank. Groups and tensors are unknown here:
a rank can wait for any object that says whether it is done.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Set
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import torch

from axonlaunch.comm.errors import CommError, DeadlockError, PeerFailedError
from axonlaunch.comm.mock.shared_device import SharedDevice

_UNWIND_S = 2.0
"""Seconds that a stopped rank thread gets to end before it is abandoned."""


class Awaited(Protocol):
    """An object that a rank can wait for."""

    @property
    def done(self) -> bool:
        """Whether waiting ranks may continue."""

    def describe(self, finished: Set[int]) -> str:
        """Describe the operation, and which of the ``finished`` ranks never arrived."""


class Failure(NamedTuple):
    """The first failure of a world."""

    rank: int
    error: BaseException


class TurnScheduler:
    """Scheduler of one mock world's ranks."""

    def __init__(
        self, world_size: int, *, timeout_s: float, device: SharedDevice | None = None
    ) -> None:
        self.device = device or SharedDevice(torch.device("cpu"))
        self.failure: Failure | None = None
        self._timeout_s = timeout_s
        self._turns = [threading.Lock() for _ in range(world_size)]
        for turn in self._turns:
            turn.acquire()
        self._lock = threading.Lock()
        self._finished_event = threading.Event()
        self._ready = deque(range(world_size))
        self._awaited: list[Awaited | None] = [None] * world_size
        self._threads: list[threading.Thread | None] = [None] * world_size
        self._finished: set[int] = set()
        self._abandoned: set[int] = set()
        self._holder = -1
        self._is_cancelled = False
        self._last_progress = 0.0
        self._random_states = [self.device.random_states()] * world_size

    # Called by rank threads.

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn.

        Raises:
            PeerFailedError: The world was canceled.
        """
        self._threads[rank] = threading.current_thread()
        self._turns[rank].acquire()
        self.device.set_random_states(self._random_states[rank])
        if self._is_cancelled:
            self.check(rank)

    def check(self, rank: int) -> None:
        """Check that the world has not failed and that this is the rank's thread.

        Raises:
            CommError: The world has failed, or this is another thread.
        """
        if threading.current_thread() is not self._threads[rank]:
            raise CommError(
                f"rank {rank} of a mock world communicates from thread "
                f"{threading.current_thread().name!r}: call collectives from the thread that "
                "MockWorld.run started (save checkpoints synchronously there)"
            )
        if self.failure is not None:
            self._raise_failure(rank, "communicating")

    def progress(self, rank: int) -> None:
        """Record that a rank communicates, so that it does not time out."""
        self.check(rank)
        self._last_progress = time.monotonic()

    def wait(self, rank: int, awaited: Awaited) -> None:
        """Let other ranks run until ``awaited`` is done.

        Raises:
            DeadlockError: All remaining ranks wait.
            PeerFailedError: A rank failed in the meantime.
        """
        if awaited.done:
            return
        self.progress(rank)
        self._awaited[rank] = awaited
        self._hand_over(rank)
        if not awaited.done:
            self._raise_failure(rank, f"waiting: {awaited.describe(frozenset())}")

    def pause(self, rank: int) -> None:
        """Let other ready ranks run before this one continues.

        This does not count as progress, so ranks that only poll each other time out.
        """
        self.check(rank)
        if self._ready:
            self._ready.append(rank)
            self._hand_over(rank)
            self.check(rank)

    def wake(self, ranks: Iterable[int], awaited: Awaited) -> None:
        """Make ranks that wait for ``awaited`` ready, in order from the current rank."""
        size = len(self._turns)
        for rank in sorted(ranks, key=lambda rank: (rank - self._holder) % size):
            if self._awaited[rank] is awaited:
                self._awaited[rank] = None
                self._ready.append(rank)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """End this rank's turns, with or without an error."""
        with self._lock:
            if rank in self._abandoned:
                return
            self._finished.add(rank)
            self._last_progress = time.monotonic()
            if error is not None:
                self._fail(rank, error)
            self._resume(self._next())

    # Called by the thread that runs the world.

    def supervise(self) -> None:
        """Start the first rank; return when all ranks have finished or been abandoned."""
        self._last_progress = time.monotonic()
        self._resume(self._next())
        try:
            while not self._finished_event.wait(
                self._last_progress + self._timeout_s - time.monotonic()
            ):
                with self._lock:
                    if time.monotonic() - self._last_progress >= self._timeout_s:
                        self._take_from_holder(TimeoutError(self._describe_late_rank()))
        except BaseException as error:  # Ctrl-C or a test's timeout: end the ranks first
            with self._lock:
                self._take_from_holder(error)
            self._finished_event.wait(_UNWIND_S)
            raise

    def call_off(self, error: BaseException, *, num_started: int) -> None:
        """Fail before the first turn, because only the first threads could be started."""
        self._is_cancelled = True
        self._ready = deque(range(num_started))
        self._finished.update(range(num_started, len(self._turns)))
        self._fail(num_started, error)

    def join(self) -> None:
        """Wait for the threads to end, but only briefly for those that may never end."""
        deadline = time.monotonic() + _UNWIND_S
        for rank, thread in enumerate(self._threads):
            if thread is not None:
                will_end = self._finished_event.is_set() and rank not in self._abandoned
                thread.join(None if will_end else max(0.0, deadline - time.monotonic()))

    def _take_from_holder(self, error: BaseException) -> None:
        """Record a failure of the current rank and continue without it."""
        holder = self._holder
        if holder >= 0:
            self._last_progress = time.monotonic()
            self._fail(holder, error)
            self._abandoned.add(holder)
            self._finished.add(holder)
            thread = self._threads[holder]
            if thread is not None and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                )
            self._resume(self._next())

    def _describe_late_rank(self) -> str:
        rank = self._holder
        thread = self._threads[rank]
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        location = (
            f"; it is in {frame.f_code.co_name} at {Path(frame.f_code.co_filename).name}:"
            f"{frame.f_lineno}"
            if frame is not None
            else ""
        )
        message = f"rank {rank} has not communicated for {self._timeout_s:g} s{location}"
        return "; ".join([message, *self._waits()])

    # Switching turns. The caller holds the lock, or is the only running rank.

    def _hand_over(self, rank: int) -> None:
        with self._lock:
            if rank in self._abandoned:
                self._raise_failure(rank, "late")
            next_rank = self._next()
            if next_rank != rank:
                self._random_states[rank] = self.device.random_states()
                self._resume(next_rank)
        if next_rank != rank:
            self._turns[rank].acquire()
            self.device.set_random_states(self._random_states[rank])

    def _next(self) -> int:
        """Return the rank to run next, or -1."""
        waits = [] if self._ready else self._waits()
        if waits:
            rank = next(r for r, awaited in enumerate(self._awaited) if awaited is not None)
            self._fail(rank, DeadlockError("deadlock, every rank waits: " + "; ".join(waits)))
        return self._ready.popleft() if self._ready else -1

    def _resume(self, rank: int) -> None:
        self._holder = rank
        if rank < 0:
            self._finished_event.set()
        else:
            self._turns[rank].release()

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = Failure(rank, error)
        for waiting, awaited in enumerate(self._awaited):
            if awaited is not None:
                self._awaited[waiting] = None
                self._ready.append(waiting)

    def _waits(self) -> list[str]:
        return [
            f"rank {rank}: {awaited.describe(self._finished)}"
            for rank, awaited in enumerate(self._awaited)
            if awaited is not None
        ]

    def _raise_failure(self, rank: int, doing: str) -> NoReturn:
        assert self.failure is not None
        culprit, error = self.failure
        if isinstance(error, DeadlockError):
            raise DeadlockError(str(error))
        raise PeerFailedError(
            f"rank {culprit} failed while rank {rank} was {doing}: {type(error).__name__}: {error}"
        )
