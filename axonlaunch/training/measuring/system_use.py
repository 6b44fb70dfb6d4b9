"""Samples the use of a node while it trains: processor, memory, GPUs, disk, network.

A thread of the node's first rank writes the figures to the events of this rank, from which the
report draws them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from axonlaunch.system import gpus
from axonlaunch.system.node import host
from axonlaunch.system.node.usage import NodeCounters, NodeUsage
from axonlaunch.system.storage.run_files import append_event

INTERVAL_S = 5.0
"""Seconds between samples."""
_LEAVE_S = 5.0
"""Seconds to wait for the last sample at the end."""
_LINES = 1000
"""Lines of the file after which it grows slower: each covers this fraction of the time so far."""
_REST = 1000.0
"""Seconds between samples for each second of work; limits the load to a thousandth of a core."""
_GPU: dict[str, tuple[Callable[[int], float], float]] = {
    "gpu_use": (torch.cuda.utilization, 1e-2),
    "gpu_power_w": (torch.cuda.power_draw, 1e-3),
    "gpu_memory_bytes": (torch.cuda.device_memory_used, 1.0),
}
"""Maps the name of a figure to a query of NVML and to the factor that converts its result."""


@contextmanager
def sample_system(
    folder: Path,
    *,
    rank: int,
    device: torch.device,
    ranks: int,
    interval_s: float = INTERVAL_S,
) -> Iterator[None]:
    """Sample this node inside of the context, in a thread.

    Args:
        folder: Run folder.
        rank: This rank, the first of its node.
        device: Device of this rank.
        ranks: Number of ranks of this node, each with a GPU if this rank has one.
        interval_s: Seconds between samples.
    """
    over = threading.Event()
    use = SystemUse(gpus_of_node(device, ranks))

    def work() -> None:
        began = written = time.monotonic()
        wait_s = interval_s
        while not over.wait(wait_s):
            cpu_s = time.thread_time()
            use.sample()
            now = time.monotonic()
            if now - written >= (now - began) / _LINES:
                written = now
                try:
                    append_event(folder, "system", use.take(), rank=rank)
                except OSError:
                    return  # a full disk, which the next line of metrics or of the log reports
            wait_s = max(interval_s, _REST * (time.thread_time() - cpu_s))

    thread = threading.Thread(target=work, name="system figures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=_LEAVE_S)  # a driver that does not answer must not keep the rank


def gpus_of_node(device: torch.device, ranks: int) -> list[int]:
    """Return the indices of the GPUs that the ranks of this node use, among those visible here.

    Args:
        device: Device of this rank.
        ranks: Number of ranks of this node.
    """
    if device.type != "cuda":
        return []
    visible = gpus.device_count()
    return [device.index or 0] if visible == 1 else [*range(min(visible, ranks))]


class SystemUse:
    """Collects samples of this node until they are written."""

    def __init__(self, devices: Sequence[int]) -> None:
        """Begin to count.

        Args:
            devices: Indices of the GPUs to read.
        """
        self._devices = list(devices)
        self._queries = dict(_GPU) if devices else {}
        self._host, self._memory_bytes = socket.gethostname(), host.memory_bytes()
        self._usage = NodeUsage()
        self._begin(self._usage.read())

    def _begin(self, counters: NodeCounters | None) -> None:
        self._counters, self._since = counters, time.monotonic()
        self._memory: list[int] = []
        self._gpus: dict[str, list[list[float]]] = defaultdict(list)

    def sample(self) -> None:
        """Read the figures of this moment: memory and GPUs."""
        self._memory.append(self._memory_bytes - host.free_memory_bytes())
        for name, (query, factor) in list(self._queries.items()):
            try:
                read = [query(device) * factor for device in self._devices]
            except Exception:  # of NVML, which the note of ``device_use`` reports
                del self._queries[name]
            else:
                self._gpus[name].append(read)

    def take(self) -> dict[str, Any]:
        """Return the use since the last call.

        Returns:
            ``host``; ``cpu``, the fraction of all cores; ``memory_bytes``, the highest, of
            ``memory_total_bytes``; bytes per second: ``disk_read_bytes_per_s``,
            ``disk_written_bytes_per_s``, ``received_bytes_per_s`` and ``sent_bytes_per_s``;
            and lists with a mean for each GPU: ``gpu_use`` (fraction), ``gpu_power_w`` and
            ``gpu_memory_bytes``. Figures that the system does not have are omitted.
        """
        counters = self._usage.read()
        figures: dict[str, Any] = {"host": self._host}
        if counters is not None and self._counters is not None:
            seconds = time.monotonic() - self._since
            figures |= counters.since(self._counters, seconds=seconds)
        figures |= {"memory_bytes": max(self._memory), "memory_total_bytes": self._memory_bytes}
        for name, samples in self._gpus.items():
            figures[name] = [sum(values) / len(samples) for values in zip(*samples, strict=True)]
        self._begin(counters)
        return {name: _rounded(value) for name, value in figures.items()}


def _rounded(value: Any) -> Any:
    """Return a value with the digits that a chart shows, which keeps the file small."""
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return round(value) if abs(value) >= 100 else float(f"{value:.3g}")
    return value
