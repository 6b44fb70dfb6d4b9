"""Exit statuses of runs that can't start: wrong configurations, and problems that may pass."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.command import TINY, Command
from support.launchers import needs

from axonlaunch.checkpoint.format.storage import reaching, storage_path
from axonlaunch.cli.training.train import _status_of
from axonlaunch.config import ConfigError, ConfigIssue, load
from axonlaunch.config.problems.errors import INVALID, TRANSIENT, exit_status
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.multinode import run_end
from axonlaunch.launch.multinode.membership import NodeMembership
from axonlaunch.launch.multinode.node_settings import check_agreement
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.system.hub import _explain


@pytest.mark.slow
def test_missing_node_0_is_a_transient_problem(served: Command) -> None:
    world = ["launch.nnodes=2", "launch.nproc=1", "launch.node_rank=1", "launch.timeout_s=1"]
    address = ["launch.master_addr=127.0.0.1", "launch.master_port=1"]
    ran = served("train", *TINY, *world, *address, status=TRANSIENT)
    assert "nothing listened at port 1 there for 1 s" in ran.stderr


def test_ranks_are_not_started_without_a_loopback_interface() -> None:
    needs("unshare")
    program = (
        "from axonlaunch.config import load\n"
        "from axonlaunch.launch.local.launcher import _rendezvous\n"
        "with _rendezvous(load([])): pass\n"
    )
    command = ["unshare", "--net", sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in ran.stderr:
        pytest.skip("no network namespace can be made here")
    assert ran.stderr.splitlines()[-1].endswith(
        "ConfigError: ranks meet at 127.0.0.1, which this node can't reach (Network is "
        "unreachable); turn its loopback interface on: ip link set lo up"
    )


def test_one_wrong_setting_makes_the_status_that_of_a_wrong_configuration() -> None:
    passing = ConfigIssue("run_dir", "another process is training in it", is_transient=True)
    wrong = ConfigIssue("model", "there is no such option")
    assert exit_status([passing]) == TRANSIENT
    assert exit_status([passing, wrong]) == INVALID
    assert exit_status([]) == INVALID
    assert (_status_of([0, TRANSIENT, INVALID]), _status_of([0, TRANSIENT])) == (INVALID, TRANSIENT)
    assert _status_of([0, 0]) == 0


@pytest.mark.parametrize(("status", "is_transient"), [(429, True), (503, True), (400, False)])
def test_only_a_busy_hub_is_a_transient_problem(status: int, is_transient: bool) -> None:
    assert _explain(OSError("no"), status).is_transient == is_transient


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("done", 0),
        ("failed", 1),
        ("interrupted", TRANSIENT),
        (run_end.TOO_FEW_NODES, TRANSIENT),
        ("", TRANSIENT),
    ],
)
def test_a_node_that_comes_late_may_try_again_unless_the_run_has_failed(
    end: str, status: int
) -> None:
    assert run_end.exit_status_and_line(end, address="10.0.0.1:29500")[0] == status


def test_missing_nodes_of_another_attempt_are_a_transient_problem() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["launch.nnodes=2", "launch.nproc=1", "launch.node_rank=0", "launch.timeout_s=1"]
    address = ["launch.master_addr=127.0.0.1", f"launch.master_port={port}"]
    printed = io.StringIO()
    node = NodeMembership(load([*words, *address]), [], RunConsole(stream=printed))
    node.attempts = node.restarts = 1
    with ExitStack() as folder:
        assert node.rendezvous(folder) is None
    node.leave(Outcome())
    assert (node.lacks_nodes, node.status) == (True, TRANSIENT)
    assert "has ended (too few nodes); start all nodes again to resume it" in printed.getvalue()


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConnectionError("reset"), TRANSIENT), (PermissionError("403"), INVALID)],
)
def test_bucket_that_does_not_answer_is_a_transient_problem(error: OSError, status: int) -> None:
    with pytest.raises(ConfigError) as caught, reaching(storage_path("memory://bucket/run")):
        raise error
    assert exit_status(caught.value.problems) == status


def test_unreadable_local_folder_is_no_transient_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, reaching(tmp_path):
        (tmp_path / "missing").read_text()
    assert exit_status(caught.value.problems) == INVALID


@pytest.mark.parametrize("is_transient", [True, False])
def test_transient_problem_of_a_node_is_transient_on_all_nodes(is_transient: bool) -> None:
    about = {"host": "a", "config": {}, "problems": []}
    other = {"host": "b", "config": {}, "problems": [["s3://b/run: no answer", is_transient]]}
    with pytest.raises(ConfigError) as caught:
        check_agreement([about, other])
    assert str(caught.value) == "node 1 (b): s3://b/run: no answer"
    assert exit_status(caught.value.problems) == (TRANSIENT if is_transient else INVALID)
