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
        (["launch.nnodes=8"], 8, RunNodes(1, 8)),
    ],
)
def test_devices_are_on_the_nodes_of_launch_settings_with_as_many_ranks(
    launch: list[str], devices: int, nodes: RunNodes
) -> None:
    config = load([*launch, "hardware=h100_80gb", "train.global_batch_size=576"])
    assert RunNodes.of_devices(config, devices) == nodes
    assert nodes.settings == {"launch.nnodes": nodes.count, "launch.nproc": nodes.ranks}


@pytest.mark.parametrize(
    ("launch", "devices", "hardware", "others"),
    [
        ([], 13, "h100_80gb", "8 or 16"),
        ([], 20, "h100_80gb", "16 or 24"),
        ([], 7, "h100_80gb", None),
        ([], 12, "h100_80gb", None),
        ([], 13, "rtx4090", None),
        (["launch.nnodes=13", "launch.nproc=1"], 13, "h100_80gb", None),
    ],
)
def test_devices_that_need_more_nodes_than_hold_them_are_uneven(
    launch: list[str], devices: int, hardware: str, others: str | None
) -> None:
    config = load([*launch, f"hardware={hardware}", "train.global_batch_size=260"])
    reason = uneven_devices(config, devices)
    assert reason is None if others is None else reason is not None and f"use {others}," in reason
