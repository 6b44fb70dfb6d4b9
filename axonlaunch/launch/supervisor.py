"""Watches ranks from outside: passes their events on, ends them all, says who failed first.

It needs no word from a rank to judge it: a signal or an exit status is enough.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from axonlaunch.events import Event, Finished, of_all_ranks
from axonlaunch.launch.rank_messages import Done, Failure

SETTLE_S = 0.3
"""How long to wait after the first failure: peers report a closed connection before the culprit
has been reaped."""


@dataclass
class Rank:
    """A process and its word."""

    number: int
    process: ForkServerProcess
    connection: Connection
    failure: Failure | None = None
    finished: Finished | None = None
    open: bool = True


@dataclass(frozen=True)
class Crash:
    """The first failure of a run.

    Attributes:
        rank: Who failed first.
        reason: One line: the exception, or the signal, or the status.
        traceback: The rank's own; None where it died without one.
        followers: Other ranks that failed after it.
    """

    rank: int
    reason: str
    traceback: str | None
    followers: tuple[int, ...]


@dataclass
class Outcome:
    """How a run ended."""

    finished: Finished | None = None
    crash: Crash | None = None
    signal: int | None = None
    killed: bool = False


@dataclass
class Supervisor:
    """Follows the ranks of a run until none is left."""

    ranks: list[Rank]
    report: Callable[[Event], None]
    tick: Callable[[], None]
    announce: Callable[[str], None]
    _signals: list[int] = field(default_factory=list)

    def run(self) -> Outcome:
        """Return when every process has ended."""
        previous = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._follow()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.kill()

    def kill(self) -> None:
        """End every rank and whatever it started, and wait until they are gone."""
        for rank in self.ranks:
            _kill(rank.process)
        for rank in self.ranks:
            rank.process.join()
            if rank.open:
                rank.connection.close()
                rank.open = False

    def _follow(self) -> Outcome:
        outcome, told = Outcome(), 0
        while True:
            self._listen(timeout=0.1)
            if any(self._has_failed(rank) for rank in self.ranks):
                outcome.crash = self._judge()
                return outcome
            self.tick()
            if len(self._signals) > told:
                told += 1
                outcome.signal = self._signals[0]
                if told > 1:
                    outcome.killed = True
                    return outcome
                self.announce("stopping after this step; once more to stop at once")
                for rank in self.ranks:
                    _signal(rank.process, signal.SIGTERM)
            if all(rank.finished is not None and not rank.open for rank in self.ranks):
                self.tick()
                ended = [rank.finished for rank in self.ranks if rank.finished is not None]
                outcome.finished = of_all_ranks(ended)
                return outcome

    def _listen(self, *, timeout: float) -> None:
        """Take what ranks sent; a connection that ends has nothing more to say."""
        connections = {rank.connection: rank for rank in self.ranks if rank.open}
        running = [r.process.sentinel for r in self.ranks if r.process.exitcode is None]
        for ready in wait([*connections, *running], timeout=timeout):
            if not isinstance(ready, Connection):
                continue
            rank = connections[ready]
            try:
                while rank.connection.poll():
                    self._take(rank, rank.connection.recv())
            except (EOFError, OSError):
                rank.connection.close()
                rank.open = False

    def _take(self, rank: Rank, message: object) -> None:
        if isinstance(message, Failure):
            rank.failure = message
        elif isinstance(message, Done):
            rank.finished = message.finished
        else:
            self.report(message)  # type: ignore[arg-type]  # ranks send nothing else

    def _has_failed(self, rank: Rank) -> bool:
        ended = rank.process.exitcode is not None and not rank.open
        return rank.failure is not None or (ended and rank.finished is None)

    def _judge(self) -> Crash:
        """Blame signals first, then errors that are not about connections, then the earliest."""
        order = [rank for rank in self.ranks if self._has_failed(rank)]
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            self._listen(timeout=0.05)
            order += [r for r in self.ranks if self._has_failed(r) and r not in order]
        culprit = min(order, key=lambda rank: (_suspicion(rank), order.index(rank)))
        number = culprit.failure.rank if culprit.failure else culprit.number
        followers = tuple(sorted(r.number for r in order if r is not culprit))
        if culprit.failure is not None:
            failure = culprit.failure
            reason = f"{failure.kind}: {failure.message}"
            return Crash(number, reason, failure.traceback, followers)
        return Crash(number, _exit_reason(culprit.process.exitcode), None, followers)

    def _note(self, number: int, frame: object) -> None:
        del frame
        self._signals.append(number)


def _suspicion(rank: Rank) -> int:
    if rank.failure is None:
        return 0
    return 2 if rank.failure.is_connection else 1


def _exit_reason(status: int | None) -> str:
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exited with status {status} before the end of training"


def _signal(process: ForkServerProcess, number: int) -> None:
    if process.pid is not None and process.exitcode is None:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _kill(process: ForkServerProcess) -> None:
    """Kill a rank and its group; a rank that has not made its group yet is killed alone."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _signal(process, signal.SIGKILL)
