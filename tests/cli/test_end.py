"""A finished command ends with its status, whatever libraries do in their teardown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import atexit, ctypes, sys, threading, time
{before}
sys.argv = ["axonlaunch", *{arguments}]
from axonlaunch.cli import main
main()
"""
ABORTS = "libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.abort, None, None)"


def _run(setup: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = COMMAND.format(before=setup, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(("overrides", "status"), [(["--version"], 0), (["ls", "nothing"], 2)])
def test_a_library_that_aborts_in_its_teardown_changes_no_status(
    overrides: list[str], status: int
) -> None:
    # Like gloo's threads, which called std::terminate (status 134) in one of nine runs.
    ran = _run(ABORTS, *overrides)
    assert ran.returncode == status, ran.stderr
    assert ran.stdout or ran.stderr  # earlier output was flushed


def test_a_node_of_a_job_writes_its_status_for_the_batch_script(tmp_path: Path) -> None:
    """SLURM signals only the process that it has started, so no shell can do this."""
    setup = f"import os; os.environ.update(AXONLAUNCH_STATUSES={str(tmp_path)!r}, SLURM_PROCID='1')"
    for arguments, status in ((["ls", "nothing"], 2), (["--version"], 0)):
        assert _run(setup, *arguments).returncode == status
        assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
            ("1", f"{status}\n")
        ]
    (tmp_path / "1").unlink()
    tmp_path.rmdir()
    assert _run(setup, "--version").returncode == 0  # the file can't be written


def test_exit_joins_threads_and_runs_atexit() -> None:
    setup = (
        "late = lambda: (time.sleep(0.5), print('a thread'), atexit.register(print, 'the end'));"
        "threading.Thread(target=late).start()"
    )
    ran = _run(setup, "--version")
    *before_the_end, last = ran.stdout.splitlines()
    assert "a thread" in before_the_end
    assert last == "the end"
    assert ran.returncode == 0


def test_internal_error_is_shown_with_exit_status_1() -> None:
    setup = "import axonlaunch.cli.app as app; app.run_command = lambda: 1 / 0"
    ran = _run(setup)
    assert ran.returncode == 1
    assert "ZeroDivisionError" in ran.stderr
