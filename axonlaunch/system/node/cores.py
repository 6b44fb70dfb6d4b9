"""Assigns physical cores of a node to ranks, close to their memory and their device.

The topology is read from Linux's ``/sys``, without torch.
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
    """Divide the logical processors available to this process among the ranks of a node.

    Two ranks never share a physical core. If each rank has a device, its cores are those of the
    NUMA node to which the device is attached. Example: a DGX H100 numbers the hardware threads of
    its first socket 0 to 55 and 112 to 167, and those of the second socket 56 to 111 and 168 to
    223. Rank 1 of 8 gets processors 14 to 27 and 126 to 139. If the processors were simply divided
    into consecutive runs of 28, rank 1 would get 28 to 55, ranks 2 and 3 would be on the other
    socket, and ranks 4 and 5 would share physical cores with ranks 0 and 1.

    Args:
        ranks: Number of ranks on this node.
        allowed: Numbers of the available processors.
        on_devices: Whether rank i computes on the i-th visible NVIDIA device.
        visible: Value of CUDA_VISIBLE_DEVICES; None if it is not set.
        system: Folder in which Linux describes the topology.

    Returns:
        Processors of each rank; None if there is one rank, or if there are fewer processors than
        ranks.
    """
    usable = set(allowed)
    if ranks == 1 or len(usable) < ranks:
        return None
    nodes = _numa_nodes(system)
    cores = _physical_cores(usable, nodes, system)
    if len(cores) < ranks:
        cores = [(processor,) for core in cores for processor in core]
    device_nodes = _device_nodes(ranks, nodes, visible, system) if on_devices else None
    shares = _divide_by_node(cores, device_nodes, nodes) if device_nodes else None
    return shares or _divide_evenly(cores, ranks)


def _divide_evenly(cores: Sequence[tuple[int, ...]], ranks: int) -> list[tuple[int, ...]]:
    """Divide cores, which are sorted by NUMA node, into equal consecutive runs."""
    size = len(cores) // ranks
    return [_processors(cores[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def _divide_by_node(
    cores: Sequence[tuple[int, ...]], device_nodes: Sequence[int], nodes: Mapping[int, int]
) -> list[tuple[int, ...]] | None:
    """Divide the cores of each NUMA node among the ranks with devices on that node.

    Returns:
        Processors of each rank; None if a node has fewer cores than ranks.
    """
    shares: list[tuple[int, ...]] = [()] * len(device_nodes)
    for node in set(device_nodes):
        ranks = [rank for rank, device_node in enumerate(device_nodes) if device_node == node]
        node_cores = [core for core in cores if nodes.get(core[0], 0) == node]
        if len(node_cores) < len(ranks):
            return None
        for rank, share in zip(ranks, _divide_evenly(node_cores, len(ranks)), strict=True):
            shares[rank] = share
    return shares


def _processors(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(processor for core in cores for processor in core))


def _physical_cores(
    usable: set[int], nodes: Mapping[int, int], system: Path
) -> list[tuple[int, ...]]:
    """Return the usable processors of each physical core, sorted by NUMA node and number."""
    cores = {
        tuple(sorted(usable & _siblings(processor, system))) or (processor,) for processor in usable
    }
    return sorted(cores, key=lambda core: (nodes.get(core[0], 0), core))


def _siblings(processor: int, system: Path) -> set[int]:
    topology = system / _CPUS / f"cpu{processor}" / "topology"
    return _read_list(topology / "thread_siblings_list") | {processor}


def _numa_nodes(system: Path) -> dict[int, int]:
    """Return the NUMA node of each processor; empty if Linux does not report NUMA nodes."""
    nodes = {}
    for folder in system.glob("devices/system/node/node[0-9]*"):
        for processor in _read_list(folder / "cpulist"):
            nodes[processor] = int(folder.name.removeprefix("node"))
    return nodes


def _device_nodes(
    ranks: int, nodes: Mapping[int, int], visible: str | None, system: Path
) -> list[int] | None:
    """Return the NUMA node of each rank's device; None if it can't be determined.

    CUDA numbers devices of the same model by their bus address.
    """
    devices = sorted((system / _DRIVER).glob("*:*:*.*"))
    if visible is not None:
        numbers = visible.split(",")
        if not all(number.isdigit() and int(number) < len(devices) for number in numbers):
            return None  # devices named by UUID, or MIG parts of devices
        devices = [devices[int(number)] for number in numbers]
    if len(devices) < ranks:
        return None
    local = [_read_list(device / "local_cpulist") for device in devices[:ranks]]
    found = [{nodes.get(processor, 0) for processor in processors} for processors in local]
    return [node for [node] in found] if all(len(node_set) == 1 for node_set in found) else None


def _read_list(path: Path) -> set[int]:
    """Read a list of processors in Linux's format, ``0-3,8``; empty if there is no file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
