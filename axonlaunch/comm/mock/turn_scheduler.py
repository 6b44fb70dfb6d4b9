"""Whose turn it is: of all rank threads one runs at a time, until it has to wait for another.

The turn goes to the rank that has been ready longest, so a run is the same every time. It also
carries the random states of torch's generators, which each rank keeps for itself. It knows
nothing of groups or tensors; what ranks wait for is anything that can say whether it is done.
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
"""How long a rank that was given up may take to leave, before it is left behind."""


class Awaited(Protocol):
    """What a rank can wait for."""

    @property
    def done(self) -> bool:
        """Whether a rank may continue."""

    def describe(self, finished: Set[int]) -> str:
        """Say what is waited for, and which of the ``finished`` ranks never arrived."""


class Failure(NamedTuple):
    """The first thing that went wrong in a world."""

    rank: int
    error: BaseException


class TurnScheduler:
    """The turns of the ranks of one mock world."""

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
        self._over = threading.Event()
        self._ready = deque(range(world_size))
        self._awaited: list[Awaited | None] = [None] * world_size
        self._threads: list[threading.Thread | None] = [None] * world_size
        self._finished: set[int] = set()
        self._lost: set[int] = set()
        self._holder = -1
        self._called_off = False
        self._moved_at = 0.0
        self._random_states = [self.device.random_states()] * world_size

    # What rank threads call.

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn.

        Raises:
            PeerFailedError: The world was called off.
        """
        self._threads[rank] = threading.current_thread()
        self._turns[rank].acquire()
        self.device.set_random_states(self._random_states[rank])
        if self._called_off:
            self.check(rank)

    def check(self, rank: int) -> None:
        """Refuse a world that has failed, and a thread that is not this rank's.

        Raises:
            CommError: It is one of these.
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
        """Note that a rank communicates, so that it does not count as late."""
        self.check(rank)
        self._moved_at = time.monotonic()

    def wait(self, rank: int, awaited: Awaited) -> None:
        """Let other ranks run until ``awaited`` is done.

        Raises:
            DeadlockError: No rank is left that could bring it about.
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
        """Let the other ranks that can run do so before this one continues.

        This is no progress: ranks that only poll each other are late in the end.
        """
        self.check(rank)
        if self._ready:
            self._ready.append(rank)
            self._hand_over(rank)
            self.check(rank)

    def wake(self, ranks: Iterable[int], awaited: Awaited) -> None:
        """Make those of ``ranks`` that wait for ``awaited`` ready, those after the holder first."""
        size = len(self._turns)
        for rank in sorted(ranks, key=lambda rank: (rank - self._holder) % size):
            if self._awaited[rank] is awaited:
                self._awaited[rank] = None
                self._ready.append(rank)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """End this rank's turns, by an error or without."""
        with self._lock:
            if rank in self._lost:
                return
            self._finished.add(rank)
            self._moved_at = time.monotonic()
            if error is not None:
                self._fail(rank, error)
            self._give_to(self._next())

    # What the thread that runs the world calls.

    def supervise(self) -> None:
        """Start the first rank; return when all have finished or been given up."""
        self._moved_at = time.monotonic()
        self._give_to(self._next())
        try:
            while not self._over.wait(self._moved_at + self._timeout_s - time.monotonic()):
                with self._lock:
                    if time.monotonic() - self._moved_at >= self._timeout_s:
                        self._take_from_holder(TimeoutError(self._say_who_is_late()))
        except BaseException as error:  # Ctrl-C, a test's time limit: unwind the ranks first
            with self._lock:
                self._take_from_holder(error)
            self._over.wait(_UNWIND_S)
            raise

    def call_off(self, error: BaseException, *, num_started: int) -> None:
        """Fail before the first turn, when only the first threads could be started."""
        self._called_off = True
        self._ready = deque(range(num_started))
        self._finished.update(range(num_started, len(self._turns)))
        self._fail(num_started, error)

    def join(self) -> None:
        """Wait for the threads to end, a moment only for those that may never do so."""
        deadline = time.monotonic() + _UNWIND_S
        for rank, thread in enumerate(self._threads):
            if thread is not None:
                ends = self._over.is_set() and rank not in self._lost
                thread.join(None if ends else max(0.0, deadline - time.monotonic()))

    def _take_from_holder(self, error: BaseException) -> None:
        """Fail the world from outside and continue without the rank that does not yield."""
        holder = self._holder
        if holder >= 0:
            self._moved_at = time.monotonic()
            self._fail(holder, error)
            self._lost.add(holder)
            self._finished.add(holder)
            thread = self._threads[holder]
            if thread is not None and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                )
            self._give_to(self._next())

    def _say_who_is_late(self) -> str:
        rank = self._holder
        thread = self._threads[rank]
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        where = (
            f"; it is in {frame.f_code.co_name} at {Path(frame.f_code.co_filename).name}:"
            f"{frame.f_lineno}"
            if frame is not None
            else ""
        )
        late = f"rank {rank} has not communicated for {self._timeout_s:g} s{where}"
        return "; ".join([late, *self._waits()])

    # The turns themselves; the lock is held, or the caller has the turn alone.

    def _hand_over(self, rank: int) -> None:
        with self._lock:
            if rank in self._lost:
                self._raise_failure(rank, "late")
            heir = self._next()
            if heir != rank:
                self._random_states[rank] = self.device.random_states()
                self._give_to(heir)
        if heir != rank:
            self._turns[rank].acquire()
            self.device.set_random_states(self._random_states[rank])

    def _next(self) -> int:
        """Choose who runs next; -1 when none is left."""
        waits = [] if self._ready else self._waits()
        if waits:
            rank = next(r for r, awaited in enumerate(self._awaited) if awaited is not None)
            self._fail(rank, DeadlockError("deadlock, every rank waits: " + "; ".join(waits)))
        return self._ready.popleft() if self._ready else -1

    def _give_to(self, rank: int) -> None:
        self._holder = rank
        if rank < 0:
            self._over.set()
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
