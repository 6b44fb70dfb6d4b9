"""Nodes on which predictions place the ranks of a run."""

from __future__ import annotations

import pytest

from axonlaunch.config import load
from axonlaunch.config.consistency.run_nodes import RunNodes, uneven_devices


@pytest.mark.parametrize(
    ("launch", "hardware", "nodes"),
    [
        (["launch.nproc=8"], "h100_80gb", RunNodes(1, 8)),
        (["launch.nnodes=3", "launch.nproc=4"], "h100_80gb", RunNodes(3, 4)),
        (["launch.nnodes=2:4", "launch.nproc=8"], "h100_80gb", RunNodes(4, 8)),
        (["launch.nproc=64"], "h100_80gb", RunNodes(8, 8)),
        (["launch.nproc=12"], "h100_80gb", RunNodes(2, 6)),
        (["launch.nproc=72"], "gb200", RunNodes(1, 72)),
        (["launch.nproc=12"], "rtx4090", RunNodes(1, 12)),
        (["launch.nnodes=2", "launch.nproc=4"], "rtx4090", RunNodes(2, 4)),
    ],
)
def test_ranks_are_on_the_nodes_of_the_launch_settings(
    launch: list[str], hardware: str, nodes: RunNodes
) -> None:
    config = load([*launch, f"hardware={hardware}", "train.global_batch_size=576"])
    assert RunNodes.of(config, config.hardware) == nodes


@pytest.mark.parametrize(
    ("launch", "devices", "nodes"),
    [
        ([], 12, RunNodes(2, 6)),
        ([], 13, RunNodes(13, 1)),
        (["launch.nnodes=3", "launch.nproc=4"], 12, RunNodes(3, 4)),
        (["launch.nnodes=3", "launch.nproc=4"], 16, RunNodes(2, 8)),
        (["launch.nnodes=8"], 8, RunNodes(8, 1)),
        (["launch.nnodes=9"], 36, RunNodes(9, 4)),
        (["launch.nnodes=2:4"], 8, RunNodes(4, 2)),
        (["launch.nnodes=3"], 16, RunNodes(2, 8)),  # 3 nodes can't share them
        (["launch.nnodes=2"], 32, RunNodes(4, 8)),  # 2 nodes can't hold them
    ],
)
def test_devices_are_on_the_nodes_that_launch_settings_describe(
    launch: list[str], devices: int, nodes: RunNodes
) -> None:
    config = load([*launch, "hardware=h100_80gb", "train.global_batch_size=576"])
    assert RunNodes.of_devices(config, devices) == nodes
    assert nodes.settings == {"launch.nnodes": nodes.count, "launch.nproc": nodes.ranks}


@pytest.mark.parametrize(
    ("launch", "devices", "hardware", "others"),
    [
        ([], 13, "h100_80gb", "8 or 16"),
        ([], 17, "h100_80gb", "16 or 24"),
        ([], 20, "h100_80gb", None),
        ([], 36, "h100_80gb", None),
        ([], 7, "h100_80gb", None),
        ([], 12, "h100_80gb", None),
        ([], 13, "rtx4090", None),
        ([], 1, "h100_80gb", None),
        (["hardware.devices_per_node=1"], 13, "h100_80gb", None),
        (["launch.nnodes=13", "launch.nproc=1"], 13, "h100_80gb", None),
        (["launch.nnodes=13"], 13, "h100_80gb", None),
        (["launch.nnodes=5"], 12, "h100_80gb", "launch.nnodes=4 or launch.nnodes=6"),
        (["launch.nnodes=5:7"], 8, "rtx4090", "launch.nnodes=4 or launch.nnodes=8"),
        (["launch.nnodes=2:3"], 8, "rtx4090", None),
        (["launch.nnodes=5", "launch.nproc=4"], 12, "h100_80gb", None),  # of another run
    ],
)
def test_devices_that_nodes_do_not_share_or_only_one_by_one_are_uneven(
    launch: list[str], devices: int, hardware: str, others: str | None
) -> None:
    config = load([f"hardware={hardware}", *launch, "train.global_batch_size=260"])
    reason = uneven_devices(config, devices)
    assert reason is None if others is None else f"use {others}" in str(reason)
