"""Supervises a node's ranks: passes their events on, detects failures and ends all ranks.

A failure is detected without a message from the rank: by a signal, an exit status, or lack of
progress.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from axonlaunch.events import Finished, Listener, merge_finished
from axonlaunch.launch.failures import hang
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.pauses import Pauses
from axonlaunch.launch.failures.report import (
    Crash,
    FailureKind,
    Report,
    exit_reason,
    report_of_rank,
)
from axonlaunch.launch.failures.root_cause import find_root_cause
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.local.messages import Done
from axonlaunch.system.node import host
from axonlaunch.system.node.cgroup_memory import RecentKills
from axonlaunch.system.processes.forked_process import ForkedProcess
from axonlaunch.system.text.streams import silence

SETTLE_S = 0.3
"""Seconds to wait after the first failure report. Peers may report a closed connection before the
process that failed has been reaped."""


@dataclass
class Rank:
    """A rank's process and the connection over which it reports.

    Attributes:
        number: Global rank; the first one if the ranks are threads of one process.
        index: Index of the process among those of this node.
    """

    number: int
    index: int
    process: ForkedProcess
    connection: Connection
    log: Path
    failure: Report | None = None
    finished: Finished | None = None
    open: bool = True

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
        self.open = False


class RemoteNodes(Protocol):
    """The other nodes of a run."""

    def failure(self) -> bool:
        """Return whether another node has failed or is lost."""

    def root_cause(self, reports: list[Report]) -> Crash:
        """Agree with the other nodes on the first failure; ``reports`` are those of this node."""

    def request_stop(self) -> None:
        """Tell the other nodes that this node received a request to stop."""

    def is_stopping(self) -> bool:
        """Return whether another node received a request to stop."""

    def is_awaited(self) -> bool:
        """Return whether a new node waits to join, which requires a restart."""

    def finish(self, finished: list[Finished], *, again: bool) -> list[Finished] | Crash:
        """Wait for the other nodes to end, and return the results of all ranks in rank order.

        Args:
            finished: Results of this node's ranks.
            again: Whether a restart follows.
        """


@dataclass
class Supervisor:
    """Supervises the ranks of a node until all have ended.

    Attributes:
        ranks: Processes of this node's ranks.
        heartbeats: Progress of each rank.
        timeout_s: Seconds without progress after which a rank counts as hanging.
        report: Receives the events of the ranks.
        tick: Function that is called ten times a second.
        announce: Receives a line for the user.
        others: The run's other nodes; None if the run has one node.
    """

    ranks: list[Rank]
    heartbeats: HeartbeatTable
    timeout_s: float
    report: Listener
    tick: Callable[[], None]
    announce: Callable[[str], None]
    others: RemoteNodes | None = None
    _signals: list[int] = field(default_factory=list)
    _makes_room: bool = False
    _kills: RecentKills = field(default_factory=RecentKills)
    _pauses: Pauses = field(default_factory=Pauses)

    def run(self) -> Outcome:
        """Supervise the ranks until every process has ended, and return the outcome."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            numbers.append(signal.SIGHUP)
        if threading.current_thread() is not threading.main_thread():
            numbers = []  # Python allows handlers only in the main thread; a script may use another
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            outcome = self._follow()
            is_stopping = self.others is not None and self.others.is_stopping()
            return replace(outcome, stop_requested=bool(self._signals) or is_stopping)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.kill()

    def fail_start(self, report: Report) -> Outcome:
        """End the ranks that were started after another one failed to start."""
        self.kill()
        crash = (
            find_root_cause([report]) if self.others is None else self.others.root_cause([report])
        )
        return Outcome(crash=crash)

    def kill(self) -> None:
        """Kill every rank and all processes that it started, and wait until they have ended."""
        for rank in self.ranks:
            rank.process.kill_group()
        for rank in self.ranks:
            rank.process.join()
            rank.close()

    def _follow(self) -> Outcome:
        handled = 0
        while True:
            self._listen(timeout=0.1)
            if (crash := self._failure()) is not None:
                return Outcome(crash=crash)
            self.tick()
            self._kills.tick()
            if len(self._signals) > handled:
                handled += 1
                if handled > 1:
                    return self._ended_at_once()
                self.announce("stopping after this step; press Ctrl-C again to stop immediately")
                if self.others is not None:
                    self.others.request_stop()
                self._stop()
            elif not self._makes_room and self.others is not None and self.others.is_awaited():
                self._makes_room = True
                self.announce("a new node joined: checkpointing and restarting with it")
                self._stop()
            if all(rank.finished is not None and not rank.open for rank in self.ranks):
                self.tick()
                return self._outcome()

    def _failure(self) -> Crash | None:
        """Return the root cause if the run has failed, else None."""
        if any(self._has_failed(rank) for rank in self.ranks):
            reports = self._settle_failures()
        elif hanging := self._hanging():
            reports = self._locate(hanging)
        elif self.others is not None and self.others.failure():
            reports = []
        else:
            return None
        return find_root_cause(reports) if self.others is None else self.others.root_cause(reports)

    def _stop(self) -> None:
        """Request that this node's ranks stop after the current step."""
        for rank in self.ranks:
            rank.process.signal(signal.SIGTERM)

    def _outcome(self) -> Outcome:
        finished = [rank.finished for rank in self.ranks if rank.finished is not None]
        if self.others is not None:
            stopped = any(outcome.interrupted for outcome in finished)
            again = self._makes_room and stopped and not self._signals
            everyone = self.others.finish(finished, again=again)
            if isinstance(everyone, Crash):
                return Outcome(crash=everyone)
            finished = everyone
        return Outcome(finished=merge_finished(finished))

    def _ended_at_once(self) -> Outcome:
        if self.others is not None:
            reason = f"interrupted twice on {socket.gethostname()}"
            self.others.root_cause([self._report(self.ranks[0], "interrupted", reason)])
        return Outcome(killed=True)

    def _listen(self, *, timeout: float) -> None:
        """Receive the messages of ranks, and close connections that have ended."""
        connections = {rank.connection: rank for rank in self.ranks if rank.open}
        running = [r.process.sentinel for r in self.ranks if not r.process.has_ended]
        sources: list[Connection | int] = [*connections, *running]
        for ready in self._pauses.watch(lambda: wait(sources, timeout=timeout)):
            if not isinstance(ready, Connection):
                continue
            rank = connections[ready]
            try:
                while rank.connection.poll():
                    self._receive(rank, rank.connection.recv())
            except (EOFError, OSError):
                rank.close()
        for rank in self.ranks:
            # Forked processes, such as data workers, may hold the other end open, so there may be
            # no end of file.
            if rank.open and rank.process.has_ended and not rank.connection.poll():
                rank.close()

    def _receive(self, rank: Rank, message: object) -> None:
        if isinstance(message, Report):
            rank.failure = message
        elif isinstance(message, Done):
            rank.finished = message.finished
        else:
            self.report(message)  # type: ignore[arg-type]  # ranks send nothing else

    def _has_failed(self, rank: Rank) -> bool:
        ended = rank.process.has_ended and not rank.open
        return rank.failure is not None or (ended and rank.finished is None)

    def _settle_failures(self) -> list[Report]:
        """Return the failures in order, after a pause in which the first one can be detected."""
        order = [rank for rank in self.ranks if self._has_failed(rank)]
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            self._listen(timeout=0.05)
            order += [r for r in self.ranks if self._has_failed(r) and r not in order]
        return [rank.failure or self._report_of_ended(rank) for rank in order]

    def _report_of_ended(self, rank: Rank) -> Report:
        """Return the report of a rank that sent none; the kernel may have killed it for memory."""
        status = rank.process.exitcode
        report = self._report(rank, "signal", exit_reason(status))
        if status != -signal.SIGKILL or not self._kills.exist():
            return report
        reason = "killed by SIGKILL; the kernel ended it because memory ran out"
        available = host.memory_bytes() // len(self.ranks)
        return replace(report, reason=reason, cause="memory", memory_bytes=available)

    def _hanging(self) -> list[Rank]:
        """Return the running ranks if one has made no progress for ``timeout_s``, else nothing.

        Pauses of this process do not count, because ranks were probably stopped too, or waited to
        send events.
        """
        running = [rank for rank in self.ranks if rank.finished is None]
        oldest = min(
            (self.heartbeats.read(rank.index).at for rank in running), default=time.monotonic()
        )
        return running if self._pauses.running_since(oldest) > self.timeout_s else []

    def _locate(self, ranks: list[Rank]) -> list[Report]:
        """Locate hanging ranks by their stacks, and return a report for each.

        Reports of ranks with fewer steps come first.
        """
        processes = {rank.index: rank for rank in ranks}
        locations = hang.ask(
            {index: rank.process.pid for index, rank in processes.items()},
            {index: rank.log for index, rank in processes.items()},
        )
        reports = [
            locations[index].to_report(self._report(rank, "hang"), timeout_s=self.timeout_s)
            for index, rank in processes.items()
        ]
        return sorted(reports, key=lambda report: report.step or 0)

    def _report(self, rank: Rank, kind: FailureKind, reason: str = "") -> Report:
        heartbeat = self.heartbeats.read(rank.index)
        return report_of_rank(
            rank.number, kind, reason, log=rank.log, step=heartbeat.step, doing=heartbeat.phase
        )

    def _on_signal(self, number: int, frame: object) -> None:
        del frame
        self._signals.append(number)
        if number == signal.SIGHUP:  # the terminal is gone, and writing to it would fail
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # both the shell and the kernel send it
            silence(*range(3))
