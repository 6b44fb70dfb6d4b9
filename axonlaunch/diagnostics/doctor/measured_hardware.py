"""Measures the hardware figures of this node's CPU and keeps them in the user's cache.

They are measured once for each number of ranks. Figures of GPUs are published ones, in
``configs/hardware``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch.config.options.hardware import GIB, HardwareConfig
from axonlaunch.system.node import host
from axonlaunch.system.processes import forked_call
from axonlaunch.system.processes.temporary_folders import temporary_folder
from axonlaunch.system.storage import cache
from axonlaunch.system.storage.disk import free_bytes

_DIGITS = 4
"""Significant digits of measured figures."""


def measure_this_node(
    context: ForkServerContext, hardware: HardwareConfig, *, ranks: int
) -> HardwareConfig:
    """Return ``hardware=cpu`` with measured figures; values set by the user are kept.

    Args:
        context: Context of the warm fork server.
        hardware: Hardware of the configuration.
        ranks: Number of ranks of the run, all on this node.
    """
    if (cached := known_hardware(hardware, ranks=ranks)) is not None:
        return cached
    return _completed(hardware, measure_hardware(context, ranks=ranks))


def known_hardware(hardware: HardwareConfig, *, ranks: int) -> HardwareConfig | None:
    """Return ``hardware=cpu`` with figures from the cache; None if nothing was measured yet."""
    figures = _read_kept(ranks)
    return None if figures is None else _completed(hardware, figures)


def _completed(hardware: HardwareConfig, figures: dict[str, Any]) -> HardwareConfig:
    fields = dataclasses.asdict(hardware)
    empty = dataclasses.asdict(HardwareConfig(name=hardware.name))
    return HardwareConfig(
        **{"name": hardware.name, **figures, **{k: v for k, v in fields.items() if v != empty[k]}}
    )


def measure_hardware(context: ForkServerContext, *, ranks: int) -> dict[str, Any]:
    """Measure this node with ``ranks`` ranks at the same time, and keep the figures."""
    threads = host.threads(ranks=ranks)
    with temporary_folder() as folder:
        store = str(folder / "store")
        calls = [(rank, ranks, threads, store, str(_disk())) for rank in range(ranks)]
        measured, *_ = forked_call.call_together(
            context,
            "axonlaunch.diagnostics.doctor.microbenchmarks:run_microbenchmarks",
            calls,
            task="measuring this node",
        )
    figures = {name: _rounded(value) for name, value in measured.items()}
    figures |= {
        "memory_gib": _rounded(host.memory_bytes() / ranks / GIB),
        # The measured figures already include these losses.
        "matrix_efficiency": 1.0,
        "multiprocessors": 1,
        "devices_per_node": ranks,
        "link": "loopback",
        "link_efficiency": 1.0,
    }
    _keep(ranks, figures)
    return figures


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _read_kept(ranks: int) -> dict[str, Any] | None:
    try:
        measured: dict[str, Any] = json.loads(_file(ranks).read_text())
    except (OSError, ValueError):
        return None
    return measured


def _keep(ranks: int, figures: dict[str, Any]) -> None:
    cache.keep(_file(ranks), json.dumps(figures, indent=1))


def _file(ranks: int) -> Path:
    """Return the cache file for this processor, its cores, the disk, and versions of the code."""
    device = _disk().stat().st_dev
    key = (processor_name(), sorted(os.sched_getaffinity(0)), device, version("torch"), _source())
    name = sha256(repr(key).encode()).hexdigest()[:16]
    return cache.cache_folder() / "hardware" / f"cpu_{ranks}_{name}.json"


def _disk() -> Path:
    """Return the existing folder on the disk that holds the runs of this working folder."""
    return free_bytes(Path("runs"))[0]


def processor_name() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _source() -> str:
    """Return a hash of the benchmark's source, because figures depend on it."""
    return sha256((Path(__file__).parent / "microbenchmarks.py").read_bytes()).hexdigest()
