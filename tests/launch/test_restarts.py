"""Restarts of failed runs; the ranks are simulated."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from axonlaunch.config import ConfigError, load
from axonlaunch.events import Finished
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.report import Crash, Report
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.local import launcher
from axonlaunch.launch.multinode import membership, run_end
from axonlaunch.launch.multinode.membership import NodeMembership
from axonlaunch.launch.multinode.rendezvous import Attempt
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.system.authentication import Credentials

CRASH = Crash(Report(rank=0, kind="error", reason="out of memory"), ())
FAILED = Outcome(crash=CRASH)
LOST = Outcome(crash=Crash(Report(rank=2, kind="lost", reason="node 1 is gone"), ()))
STOPPED = Outcome(crash=CRASH, stop_requested=True)
DONE = Outcome(finished=Finished(6, False, 1.0, None, None, None))


@pytest.mark.parametrize(
    ("allowed", "outcomes", "ends_with", "restarted"),
    [
        (2, [DONE], DONE, [False]),
        (2, [FAILED, DONE], DONE, [False, True]),
        (2, [FAILED, FAILED, FAILED, DONE], FAILED, [False, True, True]),
        (0, [FAILED, DONE], FAILED, [False]),
        (2, [STOPPED, DONE], STOPPED, [False]),
        (2, [FAILED, STOPPED, DONE], STOPPED, [False, True]),
    ],
)
def test_single_node_run_restarts_up_to_limit_unless_stopped(
    allowed: int,
    outcomes: list[Outcome],
    ends_with: Outcome,
    restarted: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[bool] = []
    left = iter(outcomes)

    def run_ranks(*arguments: object, restarted: bool = False) -> Outcome:
        del arguments
        begun.append(restarted)
        return next(left)

    monkeypatch.setattr(launcher, "run_ranks", run_ranks)
    monkeypatch.setattr(launcher, "report_crash", lambda *_: None)
    monkeypatch.setattr(
        launcher, "finish_run", lambda config, outcome, *_, **__: (0, {"outcome": outcome})
    )
    overrides = ["launch.nproc=1", "name=run"]
    config = load([*overrides, f"launch.max_restarts={allowed}"])
    options = LaunchOptions(fork_server=multiprocessing.get_context("forkserver"), started=0.0)
    _, ended = launcher.launch(config, options)
    assert ended == {"outcome": ends_with}
    assert begun == restarted


def node(
    *, restarts: int, is_headless: bool = False, will_restart: bool = False, allowed: int = 2
) -> NodeMembership:
    """Return a node of a run that may be restarted twice."""
    member = NodeMembership.__new__(NodeMembership)
    member._given = load([f"launch.max_restarts={allowed}"])
    state = {"is_headless": is_headless, "is_judged": False, "will_restart": will_restart}
    member._peers = cast("Any", SimpleNamespace(**state))
    member.restarts = member.attempts = restarts
    member.lacks_nodes = False
    return member


@pytest.mark.parametrize(
    ("is_headless", "is_judged", "lost"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_node_0_that_ended_after_it_found_the_failure_was_not_lost(
    is_headless: bool, is_judged: bool, lost: bool
) -> None:
    member = node(restarts=0)
    member._peers = cast("Any", SimpleNamespace(is_headless=is_headless, is_judged=is_judged))
    assert member.has_lost_node_0 == lost


@pytest.mark.parametrize(
    ("state", "outcome", "again", "counted"),
    [
        ({"restarts": 1}, FAILED, True, 2),
        ({"restarts": 2}, FAILED, False, 2),
        ({"restarts": 0}, STOPPED, False, 0),
        ({"restarts": 0, "is_headless": True}, FAILED, False, 0),
        ({"restarts": 0}, DONE, False, 0),
        ({"restarts": 2, "will_restart": True}, DONE, True, 2),  # makes room for a node
    ],
)
def test_multi_node_run_restarts_up_to_limit_unless_stopped(
    state: dict[str, Any], outcome: Outcome, again: bool, counted: int
) -> None:
    member = node(**state)
    attempts = member.attempts
    assert member.should_restart(outcome) == again
    assert (member.restarts, member.attempts - attempts) == (counted, int(again))


@pytest.mark.parametrize(
    ("state", "outcome", "expected"),
    [
        ({"restarts": 2}, FAILED, 1),
        ({"restarts": 0}, STOPPED, 130),
        ({"restarts": 0, "is_headless": True}, STOPPED, 130),
        ({"restarts": 0, "is_headless": True}, FAILED, 75),
        ({"restarts": 0, "allowed": 0}, LOST, 75),
        ({"restarts": 2}, LOST, 1),
        ({"restarts": 0, "allowed": 0}, FAILED, 1),
    ],
    ids=[
        "failed",
        "failed while it stopped",
        "node 0 failed while it stopped",
        "node 0 lost",
        "node lost without restarts",
        "node lost after all restarts",
        "failed without restarts",
    ],
)
def test_exit_status_says_whether_a_scheduler_should_start_the_nodes_again(
    state: dict[str, Any], outcome: Outcome, expected: int
) -> None:
    assert node(**state).exit_status(outcome, 1) == expected


def test_exit_status_without_failure_is_that_of_the_run() -> None:
    member = node(restarts=0)
    assert member.exit_status(DONE, 0) == 0
    member.lacks_nodes = True
    assert member.exit_status(DONE, 0) == 75


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run be finished in the folder that its nodes share."""
    monkeypatch.setattr(finished_runs, "finished_summary", lambda config: {"status": "done"})
    monkeypatch.setattr(finished_runs, "finished_text", lambda config, summary: "run is finished")
    monkeypatch.setattr(run_end, "_BEGIN_S", 0.6)


@pytest.mark.usefixtures("finished")
def test_node_replaced_after_a_finished_run_ends_as_done_unless_node_0_comes() -> None:
    """Node 0 of a fixed number of nodes waits for all of them."""
    with socket.socket() as node_0:
        node_0.bind(("127.0.0.1", 0))
        words = ["launch.nnodes=2", "launch.node_rank=1", "launch.nproc=1"]
        address = ["launch.master_addr=127.0.0.1", f"launch.master_port={node_0.getsockname()[1]}"]
        config = load([*words, *address])
        assert run_end.finished_without_node_0(config) == "run is finished"
        threading.Timer(0.1, node_0.listen).start()
        assert run_end.finished_without_node_0(config) is None


@pytest.mark.usefixtures("finished")
def test_node_0_of_a_finished_run_does_not_fail_because_others_knew_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handshake(*arguments: object, **options: object) -> None:
        raise TimeoutError("1")

    monkeypatch.setattr(membership, "handshake", handshake)
    first = node(restarts=0)
    first._hosts, first._frozen, first._problems, first.summary = True, None, [], None
    first._credentials = Credentials.random(sender="")
    first._console = Mock()
    store = dist.HashStore()
    monkeypatch.setattr(first, "_open", lambda *, listens: store)
    monkeypatch.setattr(first, "_round", lambda: Attempt(-1, 0, 2))
    assert first._join(ExitStack()) is None
    assert first.summary == {"status": "done"}
    monkeypatch.setattr(finished_runs, "finished_summary", lambda config: None)
    with pytest.raises(ConfigError, match="nodes 1 did not join"):
        first._join(ExitStack())
