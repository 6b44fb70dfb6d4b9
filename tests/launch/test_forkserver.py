"""The process that ranks are forked from may stop or die; the parent never waits forever."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.command import Command, wait_for
from support.launchers import logged
from support.served import Server, reached

from axonlaunch.system.processes import forked_call, forkserver
from axonlaunch.system.processes.forked_process import ForkedProcess
from axonlaunch.system.processes.process_state import state


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[forkserver.ForkServerContext]:
    """Start a separate server without torch; the tests' shared one is not used."""
    shared = dict(vars(forkserver._server()))
    fresh = {name: None for name in shared if name.startswith("_forkserver")}
    vars(forkserver._server()).update(fresh)
    vars(forkserver._server()).pop("ensure_running", None)
    monkeypatch.setattr(forkserver, "PRELOADED", ["axonlaunch.system.processes.targets"])
    monkeypatch.setattr(forkserver, "_STOPPED_S", 0.5)
    try:
        with forkserver.warm() as context:
            yield context
    finally:
        vars(forkserver._server()).update(shared)


def test_the_server_starts_however_long_tmpdir_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    long = tmp_path / ("long" * 40)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    context = request.getfixturevalue("bare")
    assert forked_call.call(context, "operator:add", 1, 2) == 3
    assert list(long.iterdir()) == []


def test_ranks_are_forked_where_segments_of_the_gpus_allocator_grow(server: Server) -> None:
    with reached(server) as context:
        setting = forked_call.call(context, "os:getenv", "PYTORCH_ALLOC_CONF")
    assert setting == "expandable_segments:True"


def _pid() -> int:
    pid: int = forkserver._server()._forkserver_pid
    return pid


def test_running_fork_server_is_reused_and_kept(
    bare: forkserver.ForkServerContext,
) -> None:
    first = _pid()
    with forkserver.warm() as context:
        assert forked_call.call(context, "operator:add", 1, 2) == 3
    assert _pid() == first
    assert forked_call.call(bare, "operator:add", 1, 2) == 3


@pytest.fixture
def sleeping(bare: forkserver.ForkServerContext) -> Iterator[ForkedProcess]:
    process = forkserver.fork(bare, "time:sleep", 600)
    yield process
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def test_stopped_fork_server_does_not_block(bare: forkserver.ForkServerContext) -> None:
    assert forked_call.call(bare, "operator:add", 1, 2) == 3
    os.kill(_pid(), signal.SIGSTOP)
    with pytest.raises(forkserver.ForkServerError, match="it was stopped or killed"):
        forked_call.call(bare, "operator:add", 1, 2)
    assert forked_call.call(bare, "operator:add", 1, 2) == 3  # from another server


def test_end_of_process_is_noticed_with_stopped_server(sleeping: ForkedProcess) -> None:
    os.kill(_pid(), signal.SIGSTOP)
    assert not sleeping.has_ended
    sleeping.signal(signal.SIGKILL)
    wait_for(lambda: sleeping.has_ended, seconds=10)
    assert sleeping.exitcode is None  # only the server knows
    sleeping.join()
    assert sleeping.has_ended


def test_process_without_fork_server_counts_as_running(sleeping: ForkedProcess) -> None:
    os.kill(_pid(), signal.SIGKILL)
    wait_for(lambda: state(_pid()) in ("", "Z"), seconds=10)
    assert not sleeping.has_ended
    assert sleeping.exitcode is None
    sleeping.kill_group()
    sleeping.join()
    assert sleeping.has_ended


def test_without_pidfd_exit_status_comes_from_fork_server(
    bare: forkserver.ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process = forkserver.fork(bare, "time:sleep", 600)
    assert not process.has_ended
    process.signal(signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _server_of(command: Command, parent: int) -> int:
    """Return the fork server of a run: the child whose children are the ranks."""
    for pid in command.processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        if int(fields[1]) == parent and arguments.startswith(b"axonlaunch: fork server"):
            return pid
    raise AssertionError("no fork server")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["Ctrl-C", "a rank's end"])
def test_run_ends_normally_with_stopped_fork_server(
    axonlaunch: Command, faulty: list[str], fault: str
) -> None:
    overrides = [*faulty, "name=run", "checkpoint.every=9999", "train.steps=9999"]
    process = axonlaunch.start("train", *overrides, "model.arguments={pause:0.2}")
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2, seconds=120)
    server = _server_of(axonlaunch, process.pid)
    ranks = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    titles = {Path(f"/proc/{rank}/cmdline").read_text().strip("\0") for rank in ranks}
    assert titles == {f"axonlaunch: rank {rank} of 2, run" for rank in range(2)}
    assert b"PATH=" in Path(f"/proc/{ranks[0]}/environ").read_bytes()
    os.kill(server, signal.SIGSTOP)
    if fault == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(int(ranks[1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    axonlaunch.wait_until_gone(seconds=5)
    if fault == "Ctrl-C":
        assert process.returncode == 130
        assert axonlaunch.summary("run")["status"] == "interrupted"
        assert list((axonlaunch.folder / "runs/run/checkpoints").iterdir())
    else:
        assert process.returncode == 1, errors
        crash = json.loads((axonlaunch.folder / "runs/run/crash.json").read_text())
        assert (crash["rank"], crash["kind"]) == (1, "signal")
