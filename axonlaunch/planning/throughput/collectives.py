"""How long a collective takes on the links that its group crosses.

The cost is alpha-beta: latency for each step and bytes over bandwidth, of a ring, or of a tree
where that is quicker. Contention between groups is not modelled.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; bus bandwidth as in NCCL's tests; hops of rings and trees over nodes as in NCCL's
src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.planning.measured_constants import COLLECTIVE_S
from axonlaunch.planning.throughput.operations import Amount, CollectiveOp
from axonlaunch.planning.throughput.roofline import figure


class Links:
    """Times of exchanges among the ranks of a mesh, which are laid out node by node."""

    def __init__(self, hardware: HardwareConfig, axes: Mapping[str, int]) -> None:
        """Lay the mesh out.

        Args:
            hardware: Of every device, node and the network.
            axes: Sizes, outermost first; the innermost ranks are neighbours in a node.
        """
        self._hardware = hardware
        self._axes = dict(axes)

    def seconds(self, exchange: CollectiveOp, amount: Amount) -> float:
        """Return the time of all runs of an exchange, in seconds."""
        size, stride = self._extent(exchange.axes)
        if size == 1:
            return 0.0
        reduces = exchange.kind == "all_reduce"
        if self.takes_cores:  # gloo scatters what it has reduced for all, and gathers in two rounds
            reduces = exchange.kind in ("all_reduce", "reduce_scatter")
        factor = 2 if reduces else 1
        in_node = min(size, self._in_node(stride))
        nodes = -(-size // in_node)
        bandwidth = self._bandwidth(in_node, nodes)
        gathers = self._hardware.allgather_bw_gb_s
        if gathers is not None and exchange.kind == "all_gather":
            bandwidth = min(bandwidth, gathers * 1e9)
        share = 1.0 if exchange.kind == "broadcast" else (size - 1) / size
        moving = factor * share * amount.num_bytes / bandwidth
        hops = (2 if self.takes_cores else factor) * self._ring_latency(size, nodes)
        if exchange.kind in ("all_reduce", "broadcast"):
            hops = min(hops, factor * self._tree_latency(in_node, nodes))
        begin = 0.0 if self.takes_cores else COLLECTIVE_S
        return amount.count * (begin + hops) + moving

    @property
    def takes_cores(self) -> bool:
        """Whether exchanges take the cores that would compute meanwhile, so that none is hidden."""
        return self._hardware.link == "loopback"

    def message(self, num_bytes: float, *, axis: str) -> float:
        """Return the time of a message to the neighbour along an axis, in seconds."""
        size, stride = self._extent((axis,))
        inside = size == 1 or self._in_node(stride) > 1
        kind = "link" if inside else "network"
        rate = figure(self._hardware, f"{kind}_gb_s") * figure(self._hardware, f"{kind}_efficiency")
        latency = figure(self._hardware, f"{kind}_latency_us") * 1e-6
        return float(COLLECTIVE_S + latency + num_bytes / (rate * 1e9))

    def _extent(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """Return how many ranks a group has, and how far apart they are."""
        size = math.prod(self._axes[axis] for axis in axes)
        names = list(self._axes)
        inner = names[max((names.index(axis) for axis in axes), default=-1) + 1 :]
        return size, math.prod(self._axes[axis] for axis in inner)

    def _in_node(self, stride: int) -> int:
        """Return how many ranks of a group are in one node."""
        if math.prod(self._axes.values()) == 1:
            return 1
        return max(1, int(figure(self._hardware, "devices_per_node")) // stride)

    def _bandwidth(self, in_node: int, nodes: int) -> float:
        """Return a ring's bandwidth at its narrowest place, bytes/s.

        A node's ranks of a group use all their network adapters, a ring through each.
        """
        link = math.inf
        if in_node > 1:
            link = figure(self._hardware, "link_gb_s") * figure(self._hardware, "link_efficiency")
        if nodes == 1:
            return float(link * 1e9)
        network = figure(self._hardware, "network_gb_s")
        network *= figure(self._hardware, "network_efficiency")
        return float(min(link, in_node * network) * 1e9)

    def _ring_latency(self, size: int, nodes: int) -> float:
        """Add up the hops once round a ring."""
        between = nodes if nodes > 1 else 0
        inside = size - 1 - between if size > nodes else 0
        return self._latency(max(0, inside), between)

    def _tree_latency(self, in_node: int, nodes: int) -> float:
        """Add up the hops up a tree: a chain in the node, then halves of the nodes."""
        return self._latency(in_node - 1, math.ceil(math.log2(nodes)) if nodes > 1 else 0)

    def _latency(self, inside: float, between: float) -> float:
        seconds = 0.0
        if inside:
            seconds += inside * figure(self._hardware, "link_latency_us") * 1e-6
        if between:
            seconds += between * figure(self._hardware, "network_latency_us") * 1e-6
        return seconds
