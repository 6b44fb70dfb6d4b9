"""Nodes on one network train together, and all end when one is lost."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.command import TINY, Command, wait_for
from support.launchers import NodeNamespaces, ended, logged, node_namespaces
from support.served import Server


def without_launch(overrides: list[str]) -> list[str]:
    return [word for word in overrides if not word.startswith("launch.")]


def test_two_nodes_train_with_one_open_port(
    two_served: NodeNamespaces, axonlaunch: Command, served: Command, faulty: list[str]
) -> None:
    two = two_served
    overrides = [*without_launch(faulty), "strategy=fsdp", "train.steps=8"]
    overrides.append("estimate.background=true")
    processes = two.start(*overrides, "name=run", "model.arguments={pause:0.2}", nproc=1)
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2)
    # Only the store is left: gloo's ports are closed once the ranks have connected.
    assert two.listening(0) == [f"{two.addresses[0]}:29500"]
    assert two.listening(1) == []
    reported = ended(processes)
    assert [status for status, _, _ in reported] == [0, 0], reported
    assert "node 1 of 2: rank 1 of 2; node 0 at 10.77.0.1 reports progress" in reported[1][1]
    served("train", *overrides, "name=local", "launch.nproc=2")
    assert axonlaunch.losses("run") == served.losses("local")
    estimated = [served.summary(name)["predicted_peak_bytes"] for name in ("run", "local")]
    assert estimated[0] == estimated[1] > 0


@pytest.mark.slow
def test_a_pulled_cable_ends_the_run_on_both_nodes(
    two_served: NodeNamespaces, axonlaunch: Command, faulty: list[str]
) -> None:
    two = two_served
    overrides = [*without_launch(faulty), "train.steps=1000", "checkpoint.every=2"]
    processes = two.start(*overrides, "name=run", "model.arguments={pause:0.1}", nproc=1)
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 3)
    two.pull(1)
    reported = ended(processes, timeout=20)
    assert [status for status, _, _ in reported] == [75, 75]  # each has lost the other
    assert "rank 1 of 2 was lost: no heartbeat from its node" in reported[0][2]
    assert "rank 0 of 2 was lost: no heartbeat from its node" in reported[1][2]
    axonlaunch.wait_until_gone(seconds=1)


@pytest.mark.slow
def test_briefly_pulled_cable_does_not_end_run(
    two: NodeNamespaces, axonlaunch: Command, served: Command, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "train.steps=20"]
    processes = two.start(*overrides, "name=run", "model.arguments={pause:0.2}", nproc=1)
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 3)
    two.pull(1)
    time.sleep(2)
    two.plug(1)
    assert [status for status, _, _ in ended(processes)] == [0, 0]
    served("train", *overrides, "name=local", "launch.nproc=2")
    assert axonlaunch.losses("run") == served.losses("local")


@pytest.mark.slow
def test_a_hybrid_layout_trains_across_nodes_to_the_bit(
    two: NodeNamespaces, axonlaunch: Command, served: Command
) -> None:
    overrides = [*TINY, "strategy=hybrid"]
    reported = ended(two.start(*overrides, "name=run", nproc=4), timeout=100)
    assert [status for status, _, _ in reported] == [0, 0], reported
    served("train", *overrides, "name=local", "launch.nproc=8")
    assert axonlaunch.losses("run") == served.losses("local")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [("SIGKILL", 3), ("exception", 2), ("exit", 0)])
def test_the_rank_that_failed_first_is_named_on_every_node(
    two: NodeNamespaces, axonlaunch: Command, faulty: list[str], fault: str, rank: int
) -> None:
    arguments = f"model.arguments={{fault:{fault},rank:{rank},step:3}}"
    overrides = [*without_launch(faulty), "name=run", arguments]
    reported = ended(two.start(*overrides, nproc=2))
    assert [status for status, _, _ in reported] == [1, 1]
    assert all(f"rank {rank} of 4 failed first" in errors for _, _, errors in reported)
    crash = json.loads((axonlaunch.folder / "runs/run/crash.json").read_text())
    assert (crash["rank"], crash["coords"]) == (rank, {"dp_replicate": rank})
    axonlaunch.wait_until_gone(seconds=3)


@pytest.mark.slow
def test_killed_launcher_of_node_leaves_no_rank(
    two: NodeNamespaces, axonlaunch: Command, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "train.steps=1000", "model.arguments={pause:0.1}"]
    for victim in (1, 0):
        name = f"run{victim}"
        processes = two.start(*overrides, f"name={name}", nproc=2)
        logged(axonlaunch.folder / "runs" / name / "metrics.jsonl", 2)
        processes[victim].kill()
        _, errors = processes[1 - victim].communicate(timeout=20)
        assert processes[1 - victim].returncode == 75
        assert "run failed" in errors
        processes[victim].communicate(timeout=5)
        axonlaunch.wait_until_gone(seconds=5)


@pytest.mark.slow
def test_a_rank_that_is_stopped_on_another_node_is_in_the_hang_report(
    two: NodeNamespaces, axonlaunch: Command, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "name=run", "launch.timeout_s=4"]
    fault = "model.arguments={fault:SIGSTOP,rank:2,step:3}"
    reported = ended(two.start(*overrides, fault, nproc=2))
    assert [status for status, _, _ in reported] == [1, 1]
    summary = " ".join(reported[0][2].replace("│", " ").split())
    assert "rank 2 of 4 made no progress for 4 s (hang): it is stopped by a signal" in summary
    # Rank 1 may wait in the previous collective, if rank 2 was stopped inside of it.
    waiting = re.findall(r"ranks? ([\d, -]+): waiting in [^,]+?: all_reduce \d+ of world", summary)
    assert ", ".join(waiting) in ("0-1, 3", "0, 3, 1"), summary


@pytest.mark.slow
def test_ctrl_c_on_one_node_saves_and_ends_all(
    two: NodeNamespaces, axonlaunch: Command, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "train.steps=1000", "checkpoint.every=500", "name=run"]
    processes = two.start(*overrides, "model.arguments={pause:0.2}", nproc=1)
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2)
    processes[1].send_signal(signal.SIGINT)
    assert [status for status, _, _ in ended(processes, timeout=30)] == [130, 130]
    assert axonlaunch.summary("run")["status"] == "interrupted"
    assert list((axonlaunch.folder / "runs/run/checkpoints").iterdir())


@pytest.mark.slow
def test_nodes_with_different_overrides_are_refused(
    two: NodeNamespaces, axonlaunch: Command
) -> None:
    world = ["launch.nnodes=2", "launch.nproc=1", f"launch.master_addr={two.addresses[0]}"]
    processes = [
        two.command(node).start(
            "train", *TINY, *world, f"launch.node_rank={node}", f"optimizer.lr={rate}"
        )
        for node, rate in enumerate((1e-3, 2e-3))
    ]
    reported = ended(processes)
    assert [status for status, _, _ in reported] == [2, 2]
    for _, _, errors in reported:
        assert "error: optimizer.lr=0.001: node 1 (" in errors
        assert "has 0.002; start every node with the same overrides" in errors
    assert not (axonlaunch.folder / "runs").exists()


@pytest.mark.slow
def test_a_node_with_another_secret_never_joins(
    two: NodeNamespaces, axonlaunch: Command, tmp_path: Path
) -> None:
    for node in range(2):
        token = tmp_path / f"token{node}"
        token.write_text(f"the secret of node {node}\n")
        token.chmod(0o600)
    world = ["launch.nnodes=2", "launch.nproc=1", f"launch.master_addr={two.addresses[0]}"]
    processes = [
        two.command(node).start(
            "train",
            *TINY,
            *world,
            f"launch.node_rank={node}",
            f"launch.token_file=token{node}",
            "launch.timeout_s=4",
        )
        for node in range(2)
    ]
    reported = ended(processes)
    assert [status for status, _, _ in reported] == [75, 2]
    assert "nodes 1 did not join within launch.timeout_s=4" in reported[0][2]
    assert "was not written by a node of this run: give every node the same" in reported[1][2]


def test_missing_multinode_settings_are_refused(served: Command) -> None:
    ran = served.train("launch.nnodes=2", "launch.nproc=1", status=2)
    assert ran.stderr.splitlines() == [
        "error: launch.node_rank=auto: which of the 2 nodes is this? write 0 on the first",
        "error: launch.master_addr=auto: is required for a multi-node run; "
        "write the address that reaches node 0",
    ]


def nodes_of(run: Path) -> list[int]:
    """Return the number of nodes in each attempt."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [len(event["hosts"]) for event in events if event["event"] == "nodes"]


def elastic(three: NodeNamespaces) -> list[str]:
    overrides = ["launch.nnodes=2:3", "launch.nproc=1", "launch.max_restarts=3"]
    return [*overrides, f"launch.master_addr={three.addresses[0]}"]


@pytest.mark.slow
def test_late_node_joins_elastic_run_without_lost_steps(
    axonlaunch: Command, served: Command, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "strategy=fsdp", "train.steps=40", "checkpoint.every=100"]
    overrides += ["train.global_batch_size=12", "checkpoint.resume=never"]
    with node_namespaces(axonlaunch.folder, 3) as three:

        def start(node: int) -> Any:
            paused = [*elastic(three), "name=run", "model.arguments={pause:0.5}"]
            return three.command(node).start("train", *overrides, *paused)

        processes = [start(node) for node in (0, 1)]
        logged(axonlaunch.folder / "runs/run/metrics.jsonl", 3)
        reported = ended([*processes, start(2)], timeout=100)
    assert [status for status, _, _ in reported] == [0, 0, 0], reported
    assert "a new node joined: checkpointing and restarting with it" in reported[0][1]
    assert reported[0][1].index("fsdp 2 on cpu") < reported[0][1].index("fsdp 3 on cpu")
    served("train", *overrides, "name=local", "launch.nproc=1")
    assert nodes_of(axonlaunch.folder / "runs/run") == [2, 3]
    losses = axonlaunch.losses("run")
    assert len(losses) == 40
    assert losses == pytest.approx(served.losses("local"), rel=1e-5)


@pytest.mark.slow
def test_elastic_run_continues_without_lost_node(
    axonlaunch: Command, served: Command, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "strategy=fsdp", "train.steps=16", "checkpoint.every=2"]
    overrides += ["train.global_batch_size=12"]
    with node_namespaces(axonlaunch.folder, 3) as three:
        processes = [
            three.command(node).start(
                "train", *overrides, *elastic(three), "name=run", "model.arguments={pause:0.3}"
            )
            for node in range(3)
        ]
        logged(axonlaunch.folder / "runs/run/metrics.jsonl", 5)
        three.pull(2)
        reported = ended(processes, timeout=60)
    assert [status for status, _, _ in reported][:2] == [0, 0], reported
    assert reported[2][0] != 0
    assert "was lost: no heartbeat from its node" in reported[0][2]
    assert "restart 1 of 3" in reported[0][1]
    assert "fsdp 3 on cpu" in reported[0][1]
    assert "fsdp 2 on cpu" in reported[0][1]
    served("train", *overrides, "name=local", "launch.nproc=1")
    assert nodes_of(axonlaunch.folder / "runs/run") == [3, 2]
    losses = axonlaunch.losses("run")
    assert len(losses) == 16
    assert losses == pytest.approx(served.losses("local"), rel=1e-5)


@pytest.mark.slow
def test_killed_node_rejoins_elastic_run_with_equal_losses(
    axonlaunch: Command, served: Command, server: Server, faulty: list[str]
) -> None:
    overrides = [*without_launch(faulty), "strategy=fsdp", "train.steps=60", "checkpoint.every=2"]
    overrides += ["train.global_batch_size=12"]
    with node_namespaces(axonlaunch.folder, 3, server) as three:
        world = [*elastic(three), "launch.nnodes=2:4", "name=run", "model.arguments={pause:0.5}"]

        def start(node: int) -> Any:
            return three.command(node).start("train", *overrides, *world)

        processes = [start(node) for node in range(3)]
        logged(axonlaunch.folder / "runs/run/metrics.jsonl", 5, seconds=120)
        processes[2].send_signal(signal.SIGKILL)
        processes[2].communicate(timeout=10)
        wait_for(lambda: nodes_of(axonlaunch.folder / "runs/run") == [3, 2], seconds=60)
        reported = ended([*processes[:2], start(2)], timeout=120)
    assert [status for status, _, _ in reported] == [0, 0, 0], reported
    assert "a new node joined: checkpointing and restarting with it" in reported[0][1]
    assert nodes_of(axonlaunch.folder / "runs/run") == [3, 2, 3]
    served("train", *overrides, "name=local", "launch.nproc=1")
    losses = axonlaunch.losses("run")
    assert len(losses) == 60
    assert losses == pytest.approx(served.losses("local"), rel=1e-5)


@pytest.mark.slow
def test_node_that_rejoins_finished_elastic_run_ends_at_once(
    axonlaunch: Command, server: Server, faulty: list[str]
) -> None:
    """While it waits for room, just after the end, and when node 0 is gone."""
    overrides = [*without_launch(faulty), "strategy=fsdp", "train.steps=40", "checkpoint.every=0"]
    overrides += ["train.global_batch_size=12"]
    with node_namespaces(axonlaunch.folder, 3, server) as three:
        world = [*elastic(three), "launch.nnodes=2:4", "launch.max_restarts=0", "name=run"]
        world.append("model.arguments={pause:0.3}")

        def start(node: int) -> Any:
            return three.command(node).start("train", *overrides, *world)

        processes = [start(node) for node in (0, 1)]
        logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2, seconds=120)
        waits = start(2)
        assert [status for status, _, _ in ended(processes, timeout=120)] == [0, 0]
        [(status, printed, errors)] = ended([waits], timeout=60)
        assert status == 0, errors
        assert "the run at 10.77.0.1:29500 is done: no step is left for this node" in printed
        [(status, printed, errors)] = ended([start(2)], timeout=60)
        assert status == 0, errors
        assert "run is finished: it has trained all of its 40 steps" in printed
        [(status, printed, errors)] = ended([start(0)], timeout=60)  # does not wait for other nodes
        assert status == 0, errors
        assert "run is finished: it has trained all of its 40 steps" in printed
