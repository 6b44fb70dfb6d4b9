"""Divides the devices and cores of this node among the runs of a sweep that train at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.system.node.cores import cores_of_ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The part of a node that one of several runs uses.

    Attributes:
        devices: Value of ``CUDA_VISIBLE_DEVICES``; None if the runs use no accelerator.
        cores: Numbers of its processors.
    """

    devices: str | None
    cores: tuple[int, ...]

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that uses this share."""
        return {} if self.devices is None else {VISIBLE: self.devices}


def needed_devices(config: RunConfig, *, accelerators: int) -> int:
    """Return the number of accelerators that a run needs on this node.

    Args:
        config: Typed configuration; ``launch.nproc=auto`` needs at least one device.
        accelerators: Number of accelerators of this node.
    """
    launch = config.launch
    if launch.device == "cpu" or not accelerators:
        return 0
    if launch.backend not in ("auto", "nccl"):  # its ranks share devices
        return 1 if launch.device == "cuda" else 0
    return 1 if launch.nproc == "auto" else launch.nproc


def share_problems(
    configs: Sequence[RunConfig], *, at_once: int, accelerators: int, cores: int
) -> Iterator[ConfigIssue]:
    """Yield the reasons why runs can't train at once on this node.

    Args:
        configs: Typed configurations of all runs.
        at_once: Number of runs that train at once.
        accelerators: Number of accelerators of this node.
        cores: Number of processors that this process may use.
    """
    option = f"--parallel {at_once}"
    most = max(needed_devices(config, accelerators=accelerators) for config in configs)
    if most * at_once > accelerators:
        fitting = max(1, accelerators // most)
        message = (
            f"{at_once} runs of {most} ranks need {most * at_once} accelerators, and this node has "
            f"{accelerators}; use --parallel {fitting}"
        )
        yield ConfigIssue("", f"{option}: {message}")
    if cores < at_once:
        message = f"each run needs a core, and this process may use {cores}"
        yield ConfigIssue("", f"{option}: {message}; use --parallel {cores}")
    ports = {config.launch.master_port for config in configs} - {"auto"}
    if ports:
        message = f"runs that train at once can't share a port; use auto, or leave out {option}"
        yield ConfigIssue("launch.master_port", message, ports.pop())


def divide_node(
    at_once: int,
    *,
    devices: int,
    allowed: Sequence[int],
    variables: Mapping[str, str] = os.environ,
) -> list[NodeShare]:
    """Return equal shares of this node; devices and cores that are left over stay unused.

    Args:
        at_once: Number of shares.
        devices: Number of accelerators to divide; 0 for runs on the CPU.
        allowed: Numbers of the processors that this process may use, at least one for each share.
        variables: Environment of this process.
    """
    visible = variables.get(VISIBLE)
    names = [str(n) for n in range(devices)] if visible is None else visible.split(",")[:devices]
    each = devices // at_once
    parts = at_once * max(1, each)
    cores = cores_of_ranks(parts, allowed=allowed, on_devices=each > 0, visible=visible)
    if cores is None and parts > at_once:  # fewer cores than devices
        cores, parts = cores_of_ranks(at_once, allowed=allowed, on_devices=False), at_once
    cores = cores or [tuple(allowed)]
    of_share = parts // at_once
    return [
        NodeShare(
            devices=",".join(names[n * each : (n + 1) * each]) if each else None,
            cores=tuple(
                sorted(itertools.chain(*cores[n * of_share : (n + 1) * of_share])),
            ),
        )
        for n in range(at_once)
    ]
