"""Which of a node's cores each rank is pinned to: whole ones, near its memory and its device.

It reads what Linux says of the node's topology, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_SYSTEM = Path("/sys")
_CPUS = "devices/system/cpu"
_DRIVER = "bus/pci/drivers/nvidia"


def cores_of_ranks(
    ranks: int,
    *,
    allowed: Iterable[int],
    on_devices: bool,
    visible: str | None = None,
    system: Path = _SYSTEM,
) -> list[tuple[int, ...]] | None:
    """Divide the logical processors that this process may use among the ranks of a node.

    Two ranks never share a physical core, and where each rank has a device, its cores are those of
    the NUMA node that the device hangs on. A DGX H100 numbers the hardware threads of its first
    socket 0 to 55 and 112 to 167, those of the second 56 to 111 and 168 to 223: rank 1 of 8 gets 14
    to 27 and 126 to 139. In equal runs of 28 it would get 28 to 55, ranks 2 and 3 the other
    socket's, and ranks 4 and 5 the second threads of the cores of ranks 0 and 1.

    Args:
        ranks: Of this node.
        allowed: The processors, by number.
        on_devices: Whether each rank computes on an NVIDIA device of its own, in their order.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        system: Where Linux shows the topology.

    Returns:
        Each rank's processors; None where one rank has them all, or there are fewer than ranks.
    """
    usable = set(allowed)
    if ranks == 1 or len(usable) < ranks:
        return None
    nodes = _numa_nodes(system)
    cores = _physical_cores(usable, nodes, system)
    if len(cores) < ranks:
        cores = [(processor,) for core in cores for processor in core]
    homes = _homes(ranks, nodes, visible, system) if on_devices else None
    shares = _near(cores, homes, nodes) if homes else None
    return shares or _in_runs(cores, ranks)


def _in_runs(cores: Sequence[tuple[int, ...]], ranks: int) -> list[tuple[int, ...]]:
    """Cut cores, those of one NUMA node in a row, into as many equal runs."""
    size = len(cores) // ranks
    return [_processors(cores[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def _near(
    cores: Sequence[tuple[int, ...]], homes: Sequence[int], nodes: Mapping[int, int]
) -> list[tuple[int, ...]] | None:
    """Divide the cores of each NUMA node among the ranks whose devices hang on it.

    Returns:
        Each rank's processors; None where some node has not a core for each of its ranks.
    """
    shares: list[tuple[int, ...]] = [()] * len(homes)
    for home in set(homes):
        ranks = [rank for rank, of_rank in enumerate(homes) if of_rank == home]
        near = [core for core in cores if nodes.get(core[0], 0) == home]
        if len(near) < len(ranks):
            return None
        for rank, share in zip(ranks, _in_runs(near, len(ranks)), strict=True):
            shares[rank] = share
    return shares


def _processors(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(processor for core in cores for processor in core))


def _physical_cores(
    usable: set[int], nodes: Mapping[int, int], system: Path
) -> list[tuple[int, ...]]:
    """Return the processors of each physical core that may be used, by NUMA node and number."""
    cores = {
        tuple(sorted(usable & _siblings(processor, system))) or (processor,) for processor in usable
    }
    return sorted(cores, key=lambda core: (nodes.get(core[0], 0), core))


def _siblings(processor: int, system: Path) -> set[int]:
    topology = system / _CPUS / f"cpu{processor}" / "topology"
    return _read_list(topology / "thread_siblings_list") | {processor}


def _numa_nodes(system: Path) -> dict[int, int]:
    """Return the NUMA node of each processor; nothing where Linux does not know of any."""
    nodes = {}
    for folder in system.glob("devices/system/node/node[0-9]*"):
        for processor in _read_list(folder / "cpulist"):
            nodes[processor] = int(folder.name.removeprefix("node"))
    return nodes


def _homes(
    ranks: int, nodes: Mapping[int, int], visible: str | None, system: Path
) -> list[int] | None:
    """Return the NUMA node of each rank's device; None where they can't be distinguished.

    CUDA numbers equal devices by their addresses on the bus.
    """
    devices = sorted((system / _DRIVER).glob("*:*:*.*"))
    if visible is not None:
        numbers = visible.split(",")
        if not all(number.isdigit() and int(number) < len(devices) for number in numbers):
            return None  # named by UUID, or parts of devices
        devices = [devices[int(number)] for number in numbers]
    if len(devices) < ranks:
        return None
    near = [_read_list(device / "local_cpulist") for device in devices[:ranks]]
    homes = [{nodes.get(processor, 0) for processor in processors} for processors in near]
    return [home for [home] in homes] if all(len(home) == 1 for home in homes) else None


def _read_list(path: Path) -> set[int]:
    """Read a list of processors as Linux writes it, ``0-3,8``; nothing where there is no file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
