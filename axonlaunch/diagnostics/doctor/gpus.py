"""What is wrong with a node's NVIDIA GPUs, said in words, and how fast their links are.

NVML's counters are read without starting CUDA; copies that time the links need it, so that they are
a process's own. Neither changes a setting.

Source: NVIDIA, "NVML API Reference Guide"; names are those of ``pynvml`` (nvidia-ml-py).
"""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

COPIED = 64 * 2**20
"""Bytes of a copy: long enough for a link's bandwidth, short enough for any device."""
_COPIES = 10
_SLOW = 0.5
"""A link with less than this share of the median of its kind is reported."""
_TOPOLOGY = {
    "NVML_TOPOLOGY_INTERNAL": "on one board",
    "NVML_TOPOLOGY_SINGLE": "one PCIe switch",
    "NVML_TOPOLOGY_MULTIPLE": "several PCIe switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "one host bridge",
    "NVML_TOPOLOGY_NODE": "one NUMA node",
    "NVML_TOPOLOGY_SYSTEM": "between NUMA nodes",
}
_SLOWED = {
    "nvmlClocksThrottleReasonHwSlowdown": "the hardware holds it back (power supply or heat)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "it is too hot; look at fans and airflow",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply asks it to brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "it is too hot; look at fans and airflow",
}
_NO_PEERS = (
    "GPUs {} and {} can't access each other's memory, so that NCCL goes through the host's: look "
    "at nvidia-smi topo -p2p r, and at IOMMU and ACS in the BIOS"
)


def nvml_report() -> dict[str, Any]:
    """Return how GPUs are connected, and a line for each thing that is wrong.

    Returns:
        ``topology``: [{``between``: [i, j], ``path``, ``nvlink``, ``peer_access``}],
        ``problems``: lines, and ``unknown``: why nothing could be asked, else empty.
    """
    nothing: dict[str, Any] = {"topology": [], "problems": []}
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        why = "ECC errors and topology are not read: nvidia-ml-py is missing"
        return {**nothing, "unknown": why}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {**nothing, "unknown": f"NVML fails: {error}; is the driver loaded (nvidia-smi)?"}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        problems = [line for n, one in enumerate(handles) for line in _problems(nvml, n, one)]
        topology = []
        for (i, one), (j, other) in itertools.combinations(enumerate(handles), 2):
            pair = _connection(nvml, one, other)
            topology.append({"between": [i, j], **pair})
            if pair["peer_access"] is False:
                problems.append(_NO_PEERS.format(i, j))
        return {"topology": topology, "problems": problems, "unknown": ""}
    finally:
        nvml.nvmlShutdown()


def _problems(nvml: Any, index: int, handle: Any) -> Iterator[str]:
    """Yield what is wrong with a GPU; what it does not support it is not asked twice."""
    ask = _asking(nvml)
    errors = ask(
        "nvmlDeviceGetTotalEccErrors",
        handle,
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    if errors:
        yield (
            f"GPU {index} had {errors} uncorrected ECC errors since its driver was loaded: take "
            "the node out, reset the GPU (nvidia-smi -r), and replace it if they return"
        )
    ecc = ask("nvmlDeviceGetEccMode", handle)
    if ecc is not None and not ecc[0]:
        yield f"GPU {index} has ECC turned off, and computes on with flipped bits: nvidia-smi -e 1"
    if (mig := ask("nvmlDeviceGetMigMode", handle)) is not None and mig[0]:
        yield (
            f"GPU {index} is divided (MIG): a rank sees one slice, and NCCL connects no slices of "
            "a GPU: nvidia-smi -mig 0 for runs of several ranks"
        )
    width = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
    most = ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    if width and most and width < most:
        yield (
            f"GPU {index} has {width} of {most} PCIe lanes, which slows loading, offloading and "
            "saving: reseat it, or look at the slot"
        )
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    said = {text for name, text in _SLOWED.items() if reasons & getattr(nvml, name, 0)}
    for text in sorted(said):
        yield f"GPU {index} is slowed down: {text}"


def _connection(nvml: Any, one: Any, other: Any) -> dict[str, Any]:
    ask = _asking(nvml)
    level = ask("nvmlDeviceGetTopologyCommonAncestor", one, other)
    paths = {getattr(nvml, name, None): text for name, text in _TOPOLOGY.items()}
    read = ask("nvmlDeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_READ)
    linked = ask("nvmlDeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return {
        "path": None if level is None else paths.get(level),
        "nvlink": None if linked is None else linked == nvml.NVML_P2P_STATUS_OK,
        "peer_access": None if read is None else read == nvml.NVML_P2P_STATUS_OK,
    }


def _asking(nvml: Any) -> Callable[..., Any]:
    """Return what calls a function of NVML; None is its answer where a GPU does not support it."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except nvml.NVMLError:
            return None

    return ask


def link_report() -> dict[str, Any]:
    """Time a copy over each link of the GPUs that this process sees.

    Returns:
        ``links``: [{``source``, ``target``, ``gb_s``}], of host to GPU, back, and between each two;
        ``problems``: a line for each link that is slower than others of its kind; ``topology`` as
        ``nvml_report``'s, as far as CUDA knows it, and ``unreachable``: a line for each pair of
        GPUs without peer access.
    """
    devices = [torch.device("cuda", n) for n in range(torch.accelerator.device_count())]
    links = []
    for device in devices:
        there, here = _buffer(device), _buffer(None)
        links += [
            _time_copy("host", str(device), there, here, device),
            _time_copy(str(device), "host", here, there, device),
        ]
    for one, other in itertools.permutations(devices, 2):
        links.append(_time_copy(str(one), str(other), _buffer(other), _buffer(one), one))
    topology, unreachable = [], []
    for i, j in itertools.combinations(range(len(devices)), 2):
        reaches = torch.cuda.can_device_access_peer(i, j)
        topology.append({"between": [i, j], "path": None, "nvlink": None, "peer_access": reaches})
        unreachable += [] if reaches else [_NO_PEERS.format(i, j)]
    return {
        "links": links,
        "problems": slow_links(links),
        "topology": topology,
        "unreachable": unreachable,
    }


def _buffer(device: torch.device | None) -> torch.Tensor:
    """Return memory of a GPU, or page-locked memory of the host."""
    if device is None:
        return torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    return torch.empty(COPIED, dtype=torch.uint8, device=device)


def _time_copy(
    source: str, target: str, to: torch.Tensor, of: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        to.copy_(of, non_blocking=True)  # connects the two
        began.record()
        for _ in range(_COPIES):
            to.copy_(of, non_blocking=True)
        ended.record()
        ended.synchronize()
        milliseconds = began.elapsed_time(ended)
    rate = _COPIES * COPIED / (milliseconds * 1e-3) / 1e9
    return {"source": source, "target": target, "gb_s": round(rate, 1)}


def slow_links(links: list[dict[str, Any]]) -> list[str]:
    """Return a line for each link that is much slower than the median of its kind."""
    lines = []
    for kind in ("to the host", "from the host", "between GPUs"):
        alike = [link for link in links if _kind(link) == kind]
        median = statistics.median(link["gb_s"] for link in alike) if alike else 0.0
        lines += [
            f"{link['source']} to {link['target']}: {link['gb_s']:g} GB/s, where {median:g} is the "
            f"median {kind}; is another program using it, or is it connected otherwise?"
            for link in alike
            if link["gb_s"] < _SLOW * median
        ]
    return lines


def _kind(link: dict[str, Any]) -> str:
    if link["target"] == "host":
        return "to the host"
    return "from the host" if link["source"] == "host" else "between GPUs"
