"""A rank ends when its launcher has ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.command import wait_for

from axonlaunch.config import ConfigError
from axonlaunch.launch.environment import launcher_process
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.environment.launcher_process import LauncherProcess
from axonlaunch.launch.external import entry, join_ranks, rank, watch as watch_module
from axonlaunch.launch.external.watch import JobWatch
from axonlaunch.launch.failures import pauses
from axonlaunch.launch.failures.report import Crash, Report
from axonlaunch.launch.failures.root_cause import find_root_cause
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.request import Request

PROGRAM = (
    "from axonlaunch.launch.environment.launcher_process import LauncherProcess as L;"
    "print(L(%r).pid)"
)


def _seen(launcher: str, variables: dict[str, str]) -> str:
    """Return the process that a rank behind two shells takes for its launcher."""
    program = f'{sys.executable} -c "{PROGRAM % launcher}"'
    ran = subprocess.run(
        ["sh", "-c", f"sh -c '{program.replace(chr(39), chr(92) + chr(34))}; true'; true"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ran.stdout.strip()


def test_launcher_process_is_parent_of_shells() -> None:
    assert _seen("mpirun", {"OMPI_COMM_WORLD_RANK": "0"}) == str(os.getpid())


def test_no_launcher_is_found_behind_a_process_that_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0"}
    pipe = subprocess.PIPE
    shell = subprocess.Popen(["cat"], env=environment, stdin=pipe, stdout=pipe, bufsize=0)
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(b".")
    shell.stdout.read(1)  # its environment can be read now
    read = launcher_process._stat

    def end_and_read(pid: int) -> list[str]:
        if pid == shell.pid:
            shell.communicate()
        return read(pid)

    monkeypatch.setattr(os, "getppid", lambda: shell.pid)
    monkeypatch.setattr(launcher_process, "_stat", end_and_read)
    assert LauncherProcess("mpirun").pid is None


def test_interactive_shell_is_not_launcher() -> None:
    assert _seen("the environment", {"RANK": "0"}) == "None"


def test_expandable_segments_are_set_under_other_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = "PYTORCH_ALLOC_CONF"
    monkeypatch.setenv(variable, "")  # so that it is restored
    monkeypatch.delenv(variable)
    monkeypatch.setattr(rank, "main", lambda *_, **__: (0, {variable: os.environ[variable]}))
    environment = ClusterEnvironment.detect(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    )
    request, watched = Request(overrides=[]), LauncherProcess("torchrun")
    ran = entry.be_rank(
        request, environment, watched, server=pytest.fail, started=0.0, as_json=False
    )
    assert ran == (0, {variable: "expandable_segments:True"})


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_end_of_launcher_is_noticed(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(pid)

    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", refused)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(launcher_process, "GRACE_S", 0.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    launcher = LauncherProcess("mpirun")
    launcher.pid = child.pid
    launcher.watch()
    assert not launcher.is_gone.wait(0.2)
    child.kill()
    assert launcher.is_gone.wait(10)
    child.communicate()
    wait_for(lambda: bool(statuses), seconds=10)
    assert statuses == [1]


def test_failed_launcher_watch_ends_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def failure() -> bool:
        raise RuntimeError("the fault of a test")

    watch = JobWatch(
        cast("Any", None),
        cast("Any", SimpleNamespace(rank=1)),
        cast("Any", SimpleNamespace(failure=failure)),
        LauncherProcess(""),
        cast("Any", None),
        cast("Any", None),
        sys.stderr,
    )
    watch.start()
    watch.join(10)
    assert ended == [1]
    assert "RuntimeError: the fault of a test" in capsys.readouterr().err


@pytest.mark.parametrize(("pause", "hang_at"), [(None, 60), ((40, 140), 160)])
def test_pause_of_a_rank_of_torchrun_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, pause: tuple[float, float] | None, hang_at: float
) -> None:
    """Ctrl-Z, a suspended SLURM job: the clock jumps while the thread waits."""
    now = 0.0

    def wait(seconds: float) -> bool:
        nonlocal now
        is_pause = pause is not None and pause[0] <= now < pause[1]
        now = pause[1] if pause is not None and is_pause else now + seconds
        assert now < 1000, "the hang was not reported"
        return False

    def fail(watch: JobWatch, reports: object) -> None:
        raise SystemExit

    clock = SimpleNamespace(monotonic=lambda: now)
    for module in (watch_module, pauses):
        monkeypatch.setattr(module, "time", clock)
    located = SimpleNamespace(to_report=lambda report, timeout_s: report)
    monkeypatch.setattr(watch_module.hang, "ask", lambda *_: {0: located})
    monkeypatch.setattr(JobWatch, "_fail", fail)
    heartbeat = SimpleNamespace(at=0.0, step=3, phase="stepping")
    watch = JobWatch(
        cast("Any", SimpleNamespace(launch=SimpleNamespace(timeout_s=60))),
        cast(
            "Any",
            SimpleNamespace(
                rank=1,
                local_rank=0,
                log=None,
                heartbeats=SimpleNamespace(read=lambda rank: heartbeat),
            ),
        ),
        cast("Any", SimpleNamespace(failure=lambda: False)),
        LauncherProcess(""),
        cast("Any", None),
        cast("Any", None),
        sys.stderr,
    )
    monkeypatch.setattr(watch, "_over", SimpleNamespace(wait=wait))
    with pytest.raises(SystemExit):
        watch._follow()
    assert now == pytest.approx(hang_at, abs=0.5)


def test_rank_ends_if_mpirun_was_killed_before_watch() -> None:
    program = (
        "from axonlaunch.launch.environment import launcher_process as module;"
        "import time; module.GRACE_S = 0.0; module._ancestor_without = lambda variables: None;"
        "module.LauncherProcess('mpirun').watch(); time.sleep(60)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", program]
    with os.fdopen(writing, "w") as unread:
        ran = subprocess.run(command, stdout=unread, timeout=30, check=False)
    assert ran.returncode == 1


def test_rank_of_dead_torchrun_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_ranks, "_AGENT_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    agent = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = ClusterEnvironment.detect({**rank, **agent, **address})
    with pytest.raises(ConfigError, match=r"waited 0.5 s, and torchrun does not listen there"):
        join_ranks.join_ranks(environment, b"")


def test_failure_after_launcher_end_is_not_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = LauncherProcess("")
    launcher.name, launcher.pid = "torchrun", 123

    def root_cause(reports: object) -> Crash:
        launcher.is_gone.set()  # noticed a moment after the connection was closed
        return find_root_cause([Report(rank=0, kind="connection", reason="Connection closed")])

    ended: list[Crash] = []

    def end(watch: JobWatch, crash: Crash, *, reports: bool) -> None:
        ended.append(crash)
        raise SystemExit

    monkeypatch.setattr(JobWatch, "_end", end)
    watch = JobWatch(
        cast("Any", None),
        cast(
            "Any", SimpleNamespace(rank=1, local_rank=0, log=None, heartbeats=HeartbeatTable.of(1))
        ),
        cast("Any", SimpleNamespace(root_cause=root_cause, report=lambda report: None)),
        launcher,
        cast("Any", None),
        cast("Any", None),
        sys.stderr,
    )
    with pytest.raises(SystemExit):
        watch._fail([])
    assert ended[0].first.reason.startswith("its launcher torchrun (process 123) is gone")
