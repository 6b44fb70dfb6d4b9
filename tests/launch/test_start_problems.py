"""Exit statuses of runs that can't start: wrong configurations, and problems that may pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import TINY, Command

from axonlaunch.checkpoint.format.storage import reaching, storage_path
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.problems.errors import INVALID, TRANSIENT, exit_status
from axonlaunch.launch.multinode.node_settings import check_agreement


@pytest.mark.slow
def test_missing_node_0_is_a_transient_problem(served: Command) -> None:
    world = ["launch.nnodes=2", "launch.nproc=1", "launch.node_rank=1", "launch.timeout_s=1"]
    address = ["launch.master_addr=127.0.0.1", "launch.master_port=1"]
    ran = served("train", *TINY, *world, *address, status=TRANSIENT)
    assert "nothing listened at port 1 there for 1 s" in ran.stderr


def test_one_wrong_setting_makes_the_status_that_of_a_wrong_configuration() -> None:
    passing = ConfigIssue("run_dir", "another process is training in it", is_transient=True)
    wrong = ConfigIssue("model", "there is no such option")
    assert exit_status([passing]) == TRANSIENT
    assert exit_status([passing, wrong]) == INVALID


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
