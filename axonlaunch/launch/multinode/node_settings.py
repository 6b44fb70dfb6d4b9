"""Resolves a node's rank, the allowed number of nodes and the rendezvous address."""

from __future__ import annotations

from typing import Any

from axonlaunch.comm.connection.rendezvous import is_own
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import nodes
from axonlaunch.config.problems.errors import plain
from axonlaunch.config.values.hub_reference import without_commits

_OWN = ("launch.node_rank", "launch.token_file", "name", "run_dir")
"""Keys that may differ between nodes. Each node sets the first two; node 0 decides the others."""
_DAY = "template_date"
"""Last part of keys that may differ, too: the day on which a node began. Node 0 decides it."""


def missing_settings(config: RunConfig) -> list[ConfigIssue]:
    """Report settings that a node needs to find the others and that are missing."""
    launch, missing = config.launch, []
    least, most = nodes(config)
    if launch.node_rank == "auto" and least == most:
        message = f"which of the {launch.nnodes} nodes is this? write 0 on the first"
        missing.append(ConfigIssue("launch.node_rank", message, "auto"))
    elif launch.node_rank != "auto" and launch.node_rank >= most:
        message = f"the nodes are 0 to {most - 1} with launch.nnodes={launch.nnodes}"
        missing.append(ConfigIssue("launch.node_rank", message, launch.node_rank))
    if launch.master_addr == "auto":
        message = "is required for a multi-node run; write the address that reaches node 0"
        missing.append(ConfigIssue("launch.master_addr", message, "auto"))
    if launch.backend == "mock":
        message = "its ranks are threads of one process; use auto, or launch.nnodes=1"
        missing.append(ConfigIssue("launch.backend", message, "mock"))
    return missing


def is_elastic(config: RunConfig) -> bool:
    """Whether the number of nodes may change during the run."""
    least, most = nodes(config)
    return least != most


def node_order(config: RunConfig) -> int:
    """Return this node's place among the others; 0 by default."""
    return 0 if config.launch.node_rank == "auto" else config.launch.node_rank


def ranks_of_node(config: RunConfig) -> int:
    """Return the number of ranks of this node."""
    return 1 if config.launch.nproc == "auto" else config.launch.nproc


def meeting_port(config: RunConfig) -> int:
    """Return the port at which the nodes meet."""
    return 29500 if config.launch.master_port == "auto" else config.launch.master_port


def is_first(config: RunConfig) -> bool:
    """Whether this is node 0, which the others connect to."""
    launch = config.launch
    return launch.node_rank == 0 or (launch.node_rank == "auto" and is_own(launch.master_addr))


def check_agreement(met: list[dict[str, Any]]) -> None:
    """Check that every node can run the configuration and that it is the same on all nodes.

    Raises:
        ConfigError: A node has problems or another configuration; all problems are listed.
    """
    first, problems = met[0]["config"], []
    for node, about in enumerate(met):
        name = f"node {node} ({about['host']})"
        problems += [
            ConfigIssue("", f"{name}: {text}", is_transient=passes)
            for text, passes in about["problems"]
        ]
        if about["problems"] or met[0]["problems"]:
            continue
        for key in sorted({*first, *about["config"]} - {*_OWN}):
            if key.rpartition(".")[2] == _DAY:
                continue
            expected, actual = first.get(key), about["config"].get(key)
            if without_commits(expected) != without_commits(actual):
                message = f"{name} has {plain(actual)}; start every node with the same overrides"
                problems.append(ConfigIssue(key, message, expected))
    if problems:
        raise ConfigError(problems)
