"""Reactions of a node's supervisor to ranks that end.

The ranks are simulated, their pipes are real.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from axonlaunch.events import Finished
from axonlaunch.launch.failures import pauses
from axonlaunch.launch.failures.report import Report, report_of_rank
from axonlaunch.launch.local import supervisor as supervisor_module
from axonlaunch.launch.local.messages import Done
from axonlaunch.launch.local.supervisor import Rank, Supervisor
from axonlaunch.system.node import cgroup_memory, host

END = Finished(3, False, 1.0, None, None, None)


class _Ended:
    """A process that has ended."""

    pid, has_ended = 1, True

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode
        self.sentinel = os.open(os.devnull, os.O_RDONLY)

    def kill_group(self) -> None:
        os.close(self.sentinel)

    def join(self) -> None:
        pass


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ends = Pipe(duplex=False)
    yield ends
    for end in ends:
        end.close()


def _supervisor(
    receiving: Connection, exitcode: int, tick: Callable[[], None] = lambda: None
) -> Supervisor:
    heartbeat = SimpleNamespace(at=time.monotonic(), step=3, phase="stepping")
    rank = Rank(0, 0, cast("Any", _Ended(exitcode)), receiving, Path("rank_0.log"))
    return Supervisor(
        ranks=[rank],
        heartbeats=cast("Any", SimpleNamespace(read=lambda index: heartbeat)),
        timeout_s=60,
        report=lambda event: None,
        tick=tick,
        announce=lambda line: None,
    )


def test_killed_rank_is_noticed_although_child_holds_pipe(
    pipe: tuple[Connection, Connection],
) -> None:
    outcome = _supervisor(pipe[0], -signal.SIGKILL).run()
    assert outcome.crash is not None
    assert outcome.crash.first.kind == "signal"


@pytest.mark.parametrize(
    ("exitcode", "kills", "cause"),
    [(-signal.SIGKILL, 4, "memory"), (-signal.SIGKILL, 3, ""), (-signal.SIGSEGV, 4, "")],
)
def test_rank_that_the_kernel_killed_for_memory_has_that_cause(
    pipe: tuple[Connection, Connection],
    monkeypatch: pytest.MonkeyPatch,
    exitcode: int,
    kills: int,
    cause: str,
) -> None:
    monkeypatch.setattr(cgroup_memory, "oom_kills", lambda: 3)
    supervisor = _supervisor(pipe[0], exitcode)
    monkeypatch.setattr(cgroup_memory, "oom_kills", lambda: kills)
    monkeypatch.setattr(host, "memory_bytes", lambda: 900)
    outcome = supervisor.run()
    assert outcome.crash is not None
    assert outcome.crash.first.cause == cause
    assert outcome.crash.first.memory_bytes == (900 if cause else None)


def test_last_message_of_rank_counts_although_child_holds_pipe(
    pipe: tuple[Connection, Connection],
) -> None:
    pipe[1].send(Done(0, END))
    outcome = _supervisor(pipe[0], 0).run()
    assert outcome.finished is not None
    assert not outcome.was_stopped


def test_run_that_fails_while_stopping_counts_as_stopped(
    pipe: tuple[Connection, Connection],
) -> None:
    supervisor = _supervisor(pipe[0], 1)
    rank = supervisor.ranks[0]

    def interrupt(line: str) -> None:
        del line
        failure = report_of_rank(0, "error", "no space left", log=rank.log, step=3, doing="saving")
        pipe[1].send(failure)

    supervisor.announce = interrupt
    cast("Any", rank.process).has_ended = False
    cast("Any", rank.process).signal = lambda number: None
    supervisor.tick = lambda: signal.raise_signal(signal.SIGINT) if not rank.failure else None
    outcome = supervisor.run()
    assert outcome.crash is not None
    assert outcome.was_stopped


@pytest.mark.parametrize(
    ("work_s", "pause", "progress_at", "hang_at"),
    [
        (1.0, None, 0, 60),
        (6.0, None, 0, 60),  # each look takes long, as with a run folder on a slow disk
        (1.0, (40, 140), 0, 160),
        (1.0, (40, 140), 100, 200),  # only the rest of the pause
        (1.0, (40, 140), 150, 210),
    ],
)
def test_only_pauses_of_the_launcher_since_the_last_progress_delay_a_hang(
    pipe: tuple[Connection, Connection],
    monkeypatch: pytest.MonkeyPatch,
    work_s: float,
    pause: tuple[float, float] | None,
    progress_at: float,
    hang_at: float,
) -> None:
    """Ctrl-Z, a suspended SLURM job: the clock jumps while the launcher waits for messages."""
    supervisor = _supervisor(pipe[0], 0)
    process = cast("Any", supervisor.ranks[0].process)
    process.has_ended = False
    now = 0.0

    def wait(sources: list[Any], timeout: float) -> list[Any]:
        nonlocal now
        is_pause = pause is not None and pause[0] <= now < pause[1]
        now = pause[1] if pause is not None and is_pause else now + timeout
        return []

    def tick() -> None:
        nonlocal now
        now += work_s
        assert now < 1000, "the hang was not reported"

    def read(index: int) -> SimpleNamespace:
        at = progress_at if now >= progress_at else 0.0
        return SimpleNamespace(at=at, step=3, phase="stepping")

    for module in (supervisor_module, pauses):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(supervisor_module, "wait", wait)
    monkeypatch.setattr(supervisor, "heartbeats", SimpleNamespace(read=read))
    monkeypatch.setattr(supervisor, "_locate", lambda ranks: [_hang_report(supervisor)])
    supervisor.tick = tick
    outcome = supervisor.run()
    assert outcome.crash is not None
    assert outcome.crash.first.kind == "hang"
    assert now == pytest.approx(hang_at, abs=work_s + 0.5)


def _hang_report(supervisor: Supervisor) -> Report:
    log = supervisor.ranks[0].log
    return report_of_rank(0, "hang", "no progress", log=log, step=3, doing="stepping")
