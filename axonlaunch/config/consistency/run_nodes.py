"""Places the ranks of a run on nodes, for predictions of time, memory and failures.

A launcher starts equally many ranks on each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from axonlaunch.config.consistency.layout import nodes, num_ranks
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.problems.errors import divisors, one_of
from axonlaunch.config.schema import RunConfig


@dataclass(frozen=True)
class RunNodes:
    """Nodes of a run.

    Attributes:
        count: Number of nodes; the largest one of an elastic run.
        ranks: Number of ranks on each node.
    """

    count: int = 1
    ranks: int = 1

    @classmethod
    def of(cls, config: RunConfig, hardware: HardwareConfig | None) -> Self:
        """Return the nodes that ``launch.nnodes`` and ``launch.nproc`` describe.

        ``launch.nproc`` is resolved. If it is more than ``devices_per_node`` of the hardware, its
        ranks are on the smallest number of such nodes with equally many ranks: 64 ranks on 8 nodes
        with 8 devices, 12 ranks on 2 of them with 6 ranks each.
        """
        nproc = config.launch.nproc
        assert nproc != "auto"
        ranks = _largest_part(nproc, hardware)
        return cls(count=num_ranks(config) // ranks, ranks=ranks)

    @classmethod
    def of_devices(cls, config: RunConfig, devices: int) -> Self:
        """Return the nodes of a run with one rank for each of a number of devices.

        They are those of the configuration if it describes them, else as few nodes of its hardware
        as share the devices equally.
        """
        count = nodes(config)[1] if describes_nodes(config, devices) else 1
        ranks = _largest_part(devices // count, config.hardware)
        return cls(count=devices // ranks, ranks=ranks)

    @property
    def settings(self) -> dict[str, int]:
        """Settings that give a run these nodes."""
        return {"launch.nnodes": self.count, "launch.nproc": self.ranks}


def describes_nodes(config: RunConfig, devices: int) -> bool:
    """Return whether the launch settings say on which nodes a number of devices is.

    ``launch.nnodes`` times ``launch.nproc`` is this number, or ``launch.nnodes`` alone is more than
    1 and shares it equally.
    """
    if config.launch.nproc != "auto":
        return num_ranks(config) == devices
    count, most = nodes(config)[1], _devices_per_node(config.hardware)
    return count > 1 and devices % count == 0 and (most is None or devices // count <= most)


def uneven_devices(config: RunConfig, devices: int) -> str | None:
    """Return why no nodes share a number of devices equally, or None if some do.

    13 devices in nodes of 8 would be 13 nodes with one rank each, which nobody has. Nodes that the
    launch settings describe are taken as they are, if ``launch.nnodes`` divides the devices. Of an
    elastic run, one of its numbers of nodes must divide them.
    """
    least, largest = nodes(config)
    most = _devices_per_node(config.hardware)
    counts = range(least, largest + 1)
    if config.launch.nproc == "auto" and all(devices % count for count in counts):
        return _other_nodes(config.launch.nnodes, counts, devices=devices)
    if most in (None, 1) or describes_nodes(config, devices):
        return None
    if devices == 1 or _largest_part(devices, config.hardware) > 1:
        return None
    full = devices // most * most
    return (
        f"nodes with up to {most} devices (hardware.devices_per_node) can't share them equally; "
        f"use {full} or {full + most}, or launch.nnodes={devices} for one device on each node"
    )


def _other_nodes(nnodes: int | str, counts: range, *, devices: int) -> str:
    """Return that such numbers of nodes can't share the devices, and the closest ones that can."""
    fewer = [n for n in divisors(devices) if n < counts.start][-1:]
    more = [n for n in divisors(devices) if n >= counts.stop][:1]
    others = one_of([f"launch.nnodes={n}" for n in fewer + more])
    return f"launch.nnodes={nnodes} can't share them equally; use {others}"


def _devices_per_node(hardware: HardwareConfig | None) -> int | None:
    return None if hardware is None else hardware.devices_per_node


def _largest_part(ranks: int, hardware: HardwareConfig | None) -> int:
    """Return the largest divisor of a number of ranks that a node of the hardware can hold."""
    most = _devices_per_node(hardware)
    return ranks if most is None else max(part for part in divisors(ranks) if part <= most)
