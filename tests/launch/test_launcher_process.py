"""A rank ends when what started it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from command import wait_for

from axonlaunch.launch.external import launcher_process
from axonlaunch.launch.external.launcher_process import LauncherProcess
from axonlaunch.launch.external.watch import JobWatch

TOLD = (
    "from axonlaunch.launch.external.launcher_process import LauncherProcess as L; print(L(%r).pid)"
)


def _seen(launcher: str, variables: dict[str, str]) -> str:
    """Return which process a rank behind two shells takes for its launcher."""
    program = f'{sys.executable} -c "{TOLD % launcher}"'
    ran = subprocess.run(
        ["sh", "-c", f"sh -c '{program.replace(chr(39), chr(92) + chr(34))}; true'; true"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ran.stdout.strip()


def test_the_launcher_is_what_started_the_shells_around_a_rank() -> None:
    assert _seen("mpirun", {"OMPI_COMM_WORLD_RANK": "0"}) == str(os.getpid())


def test_a_shell_in_which_a_person_starts_a_rank_is_no_launcher() -> None:
    assert _seen("the environment", {"RANK": "0"}) == "None"


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_the_launcher_is_seen(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
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


def test_a_watch_that_fails_ends_its_process(
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
