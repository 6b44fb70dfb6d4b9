"""Finds problems of a node's NVIDIA GPUs and measures the speed of their links.

NVML's counters are read without initializing CUDA. Measuring the links initializes CUDA, so it runs
in a separate process. Neither changes a setting.

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
"""Bytes of a copy: large enough to measure bandwidth, small enough for any device."""
_COPIES = 10
_SLOW = 0.5
"""Links slower than this fraction of the median of their kind are reported."""
_TOPOLOGY = {
    "NVML_TOPOLOGY_INTERNAL": "on one board",
    "NVML_TOPOLOGY_SINGLE": "one PCIe switch",
    "NVML_TOPOLOGY_MULTIPLE": "several PCIe switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "one host bridge",
    "NVML_TOPOLOGY_NODE": "one NUMA node",
    "NVML_TOPOLOGY_SYSTEM": "between NUMA nodes",
}
_SLOWED = {
    "nvmlClocksThrottleReasonHwSlowdown": "the hardware limits it (power supply or heat)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "it is too hot; check fans and airflow",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply signals a power brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "it is too hot; check fans and airflow",
}
_NO_PEERS = (
    "GPUs {} and {} can't access each other's memory, so NCCL copies through host memory: check "
    "nvidia-smi topo -p2p r, and IOMMU and ACS in the BIOS"
)


def nvml_report() -> dict[str, Any]:
    """Return how GPUs are connected, and a line for each problem.

    Returns:
        ``topology``: [{``between``: [i, j], ``path``, ``nvlink``, ``peer_access``}],
        ``problems``: lines, and ``unknown``: the reason if NVML is not available, otherwise empty.
    """
    nothing: dict[str, Any] = {"topology": [], "problems": []}
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        reason = "ECC errors and topology: install nvidia-ml-py to read them"
        return {**nothing, "unknown": reason}
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
    """Yield a line for each problem of a GPU; queries that it does not support are skipped."""
    query = _query(nvml)
    errors = query(
        "nvmlDeviceGetTotalEccErrors",
        handle,
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    if errors:
        yield (
            f"GPU {index} had {errors} uncorrected ECC errors since its driver was loaded: stop "
            "using the node, reset the GPU (nvidia-smi -r), and replace it if they return"
        )
    ecc = query("nvmlDeviceGetEccMode", handle)
    if ecc is not None and not ecc[0]:
        yield (
            f"GPU {index} has ECC turned off, so memory errors go unnoticed: turn it on with "
            "nvidia-smi -e 1"
        )
    if (mig := query("nvmlDeviceGetMigMode", handle)) is not None and mig[0]:
        yield (
            f"GPU {index} is divided by MIG: a rank uses one slice, and NCCL can't connect slices "
            "of a GPU; for runs of several ranks turn it off with nvidia-smi -mig 0"
        )
    width = query("nvmlDeviceGetCurrPcieLinkWidth", handle)
    max_width = query("nvmlDeviceGetMaxPcieLinkWidth", handle)
    if width and max_width and width < max_width:
        yield (
            f"GPU {index} uses {width} of {max_width} PCIe lanes, which slows loading, offloading "
            "and saving: reseat the card, or check its slot"
        )
    reasons = query("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    texts = {text for name, text in _SLOWED.items() if reasons & getattr(nvml, name, 0)}
    for text in sorted(texts):
        yield f"GPU {index} is slowed down: {text}"


def _connection(nvml: Any, one: Any, other: Any) -> dict[str, Any]:
    query = _query(nvml)
    level = query("nvmlDeviceGetTopologyCommonAncestor", one, other)
    paths = {getattr(nvml, name, None): text for name, text in _TOPOLOGY.items()}
    read = query("nvmlDeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_READ)
    linked = query("nvmlDeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return {
        "path": None if level is None else paths.get(level),
        "nvlink": None if linked is None else linked == nvml.NVML_P2P_STATUS_OK,
        "peer_access": None if read is None else read == nvml.NVML_P2P_STATUS_OK,
    }


def _query(nvml: Any) -> Callable[..., Any]:
    """Return a function that calls NVML by name and returns None if the GPU does not support it."""

    def query(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except nvml.NVMLError:
            return None

    return query


def link_report() -> dict[str, Any]:
    """Measure the speed of copies over each link of the GPUs that this process sees.

    Returns:
        ``links``: [{``source``, ``target``, ``gb_s``}] for host to GPU, GPU to host, and each pair
        of GPUs; ``problems``: a line for each link that is slower than others of its kind;
        ``topology``: the format of ``nvml_report``, with peer access only; ``unreachable``: a line
        for each pair of GPUs without peer access.
    """
    devices = [torch.device("cuda", n) for n in range(torch.accelerator.device_count())]
    links = []
    for device in devices:
        on_device, on_host = _buffer(device), _buffer(None)
        links += [
            _time_copy("host", str(device), on_device, on_host, device),
            _time_copy(str(device), "host", on_host, on_device, device),
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
    """Allocate a buffer on a GPU, or in page-locked host memory."""
    if device is None:
        return torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    return torch.empty(COPIED, dtype=torch.uint8, device=device)


def _time_copy(
    source: str, target: str, output: torch.Tensor, input_: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        output.copy_(input_, non_blocking=True)  # warm-up: establishes the connection
        began.record()
        for _ in range(_COPIES):
            output.copy_(input_, non_blocking=True)
        ended.record()
        ended.synchronize()
        milliseconds = began.elapsed_time(ended)
    rate = _COPIES * COPIED / (milliseconds * 1e-3) / 1e9
    return {"source": source, "target": target, "gb_s": round(rate, 1)}


def slow_links(links: list[dict[str, Any]]) -> list[str]:
    """Return a line for each link that is much slower than the median of its kind."""
    lines = []
    for kind in ("to the host", "from the host", "between GPUs"):
        same_kind = [link for link in links if _kind(link) == kind]
        median = statistics.median(link["gb_s"] for link in same_kind) if same_kind else 0.0
        lines += [
            f"{link['source']} to {link['target']}: {link['gb_s']:g} GB/s, but the median {kind} "
            f"is {median:g} GB/s; check its connection, and whether another program uses it"
            for link in same_kind
            if link["gb_s"] < _SLOW * median
        ]
    return lines


def _kind(link: dict[str, Any]) -> str:
    if link["target"] == "host":
        return "to the host"
    return "from the host" if link["source"] == "host" else "between GPUs"
