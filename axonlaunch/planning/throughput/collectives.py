"""Estimates the time of collectives and messages from the links that they use.

The alpha-beta model adds a latency per hop and the transferred bytes divided by the bandwidth. The
algorithm is a ring, or a tree if that has lower latency. Contention between groups is not modeled.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; bus bandwidth as in NCCL's tests; hops of rings and trees over nodes as in NCCL's
src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.measured_constants import COLLECTIVE_S, CONGESTED_NODES
from axonlaunch.planning.throughput.operations import Amount, CollectiveOp
from axonlaunch.planning.throughput.roofline import figure


class Links:
    """Times of communication between the ranks of a mesh, whose ranks are numbered node by node."""

    def __init__(
        self, hardware: HardwareConfig, *meshes: Mapping[str, int], ranks_per_node: int
    ) -> None:
        """Describe the meshes of a run, which have the same ranks.

        Args:
            hardware: Description of the devices and network.
            meshes: Sizes of the axes of each mesh, outermost first. Ranks along the innermost axis
                are neighbors in a node.
            ranks_per_node: Number of ranks on each node.
        """
        self._hardware = hardware
        self._meshes = [dict(axes) for axes in meshes]
        self._ranks_per_node = ranks_per_node

    def seconds(self, collective: CollectiveOp, amount: Amount) -> float:
        """Return the time of all runs of a collective, in seconds."""
        size, stride = self._extent(collective.axes)
        if size == 1:
            return 0.0
        has_two_rounds = collective.kind == "all_reduce"
        if (
            self.computes_on_cores
        ):  # gloo's reduce-scatter all-reduces, and its gather takes two rounds
            has_two_rounds = collective.kind in ("all_reduce", "reduce_scatter")
        factor = 2 if has_two_rounds else 1
        per_node, nodes = self._spread(size, stride)
        if collective.kind == "all_to_all":
            return self._exchange_time(amount, size, per_node)
        bandwidth = self._bandwidth(per_node, nodes)
        gather_bandwidth = self._hardware.allgather_bw_gb_s
        if gather_bandwidth is not None and collective.kind == "all_gather":
            bandwidth = min(bandwidth, gather_bandwidth * 1e9)
        share = 1.0 if collective.kind == "broadcast" else (size - 1) / size
        transfer = factor * share * amount.num_bytes / bandwidth
        hops = (2 if self.computes_on_cores else factor) * self._ring_latency(size, nodes)
        if collective.kind in ("all_reduce", "broadcast"):
            hops = min(hops, factor * self._tree_latency(per_node, nodes))
        launch = 0.0 if self.computes_on_cores else COLLECTIVE_S
        return amount.count * (launch + hops) + transfer

    def _exchange_time(self, amount: Amount, size: int, per_node: int) -> float:
        """Return the time of all-to-alls: what leaves the node shares one adapter per rank.

        The messages of a rank to all others travel at the same time.
        """
        inside, outside = ((count / size) for count in (per_node - 1, size - per_node))
        seconds = [
            share * amount.num_bytes / (self._rate(kind) * 1e9)
            for share, kind in ((inside, "link"), (outside, "network"))
            if share
        ]
        latency = self._latency(min(1, per_node - 1), min(1, size - per_node))
        launch = 0.0 if self.computes_on_cores else COLLECTIVE_S
        return amount.count * (launch + latency) + max(seconds)

    def _rate(self, kind: str) -> float:
        """Return the bandwidth that collectives reach on ``link`` or ``network``, in GB/s."""
        return float(
            figure(self._hardware, f"{kind}_gb_s") * figure(self._hardware, f"{kind}_efficiency")
        )

    @property
    def computes_on_cores(self) -> bool:
        """Whether communication uses the CPU cores that compute, so they cannot overlap."""
        return self._hardware.link == "loopback"

    def message(self, num_bytes: float, *, axis: str) -> float:
        """Return the time of a message to the neighbor along an axis, in seconds."""
        size, stride = self._extent((axis,))
        is_in_node = size == 1 or self._ranks_per_node // stride > 1
        kind = "link" if is_in_node else "network"
        latency = figure(self._hardware, f"{kind}_latency_us") * 1e-6
        return float(COLLECTIVE_S + latency + num_bytes / (self._rate(kind) * 1e9))

    def _extent(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """Return the number of ranks of a group, and the distance between their global ranks."""
        mesh = next(mesh for mesh in self._meshes if mesh.keys() >= {*axes})
        size = math.prod(mesh[axis] for axis in axes)
        names = list(mesh)
        inner = names[max((names.index(axis) for axis in axes), default=-1) + 1 :]
        return size, math.prod(mesh[axis] for axis in inner)

    def _spread(self, size: int, stride: int) -> tuple[int, int]:
        """Return the ranks of a group in one node, and its number of nodes.

        If nodes do not hold the same parts of all groups, these are the fewest ranks in a node of
        the group that is spread most.
        """
        in_node, span = self._ranks_per_node, size * stride
        if all(in_node % part == 0 or part % in_node == 0 for part in (stride, span)):
            per_node = min(size, max(1, in_node // stride))
            return per_node, size // per_node
        groups = [
            Counter((first + member * stride) // in_node for member in range(size))
            for block in range(0, math.prod(self._meshes[0].values()), span)
            for first in range(block, block + stride)
        ]
        return min(
            ((min(group.values()), len(group)) for group in groups),
            key=lambda spread: (-spread[1], spread[0]),
        )

    def _bandwidth(self, per_node: int, nodes: int) -> float:
        """Return the lowest bandwidth along a ring, in bytes/s.

        Each rank of a group in a node uses its network adapter, with one ring per adapter.
        """
        link = math.inf
        if per_node > 1:
            link = self._rate("link")
        if nodes == 1:
            return float(link * 1e9)
        network = per_node * self._rate("network") / (1 + nodes / CONGESTED_NODES)
        return float(min(link, network) * 1e9)

    def _ring_latency(self, size: int, nodes: int) -> float:
        """Return the latency of one round of a ring."""
        network_hops = nodes if nodes > 1 else 0
        link_hops = size - 1 - network_hops if size > nodes else 0
        return self._latency(max(0, link_hops), network_hops)

    def _tree_latency(self, per_node: int, nodes: int) -> float:
        """Return the latency of a tree: a chain inside each node, and a binary tree of nodes."""
        return self._latency(per_node - 1, math.ceil(math.log2(nodes)) if nodes > 1 else 0)

    def _latency(self, link_hops: float, network_hops: float) -> float:
        seconds = 0.0
        if link_hops:
            seconds += link_hops * figure(self._hardware, "link_latency_us") * 1e-6
        if network_hops:
            seconds += network_hops * figure(self._hardware, "network_latency_us") * 1e-6
        return seconds
