"""Figures of this node, measured once for each number of ranks and kept in the user's cache.

Other hardware has published figures, in ``configs/hardware``; nothing here measures a GPU.
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

from axonlaunch.config.hardware import GIB, HardwareConfig
from axonlaunch.system import cache, forked_call, host
from axonlaunch.system.temporary_folders import temporary_folder

_ROUND = 4
"""Digits of a figure that a measurement bears."""


def of_this_node(
    context: ForkServerContext, hardware: HardwareConfig, *, ranks: int
) -> HardwareConfig:
    """Return ``hardware=cpu`` with what was measured of it; what the user gave stays.

    Args:
        context: Of the warm fork server.
        hardware: As composed.
        ranks: Of the run, all on this node.
    """
    if (before := known_hardware(hardware, ranks=ranks)) is not None:
        return before
    return _completed(hardware, measure_hardware(context, ranks=ranks))


def known_hardware(hardware: HardwareConfig, *, ranks: int) -> HardwareConfig | None:
    """Do as ``of_this_node`` with what was measured before; None where nothing was."""
    figures = _read_kept(ranks)
    return None if figures is None else _completed(hardware, figures)


def _completed(hardware: HardwareConfig, figures: dict[str, Any]) -> HardwareConfig:
    fields = dataclasses.asdict(hardware)
    empty = dataclasses.asdict(HardwareConfig(name=hardware.name))
    return HardwareConfig(
        **{"name": hardware.name, **figures, **{k: v for k, v in fields.items() if v != empty[k]}}
    )


def measure_hardware(context: ForkServerContext, *, ranks: int) -> dict[str, Any]:
    """Measure this node with so many ranks at once, and keep what was found."""
    threads = host.threads(ranks=ranks)
    with temporary_folder() as folder:
        store = str(folder / "store")
        calls = [(rank, ranks, threads, store) for rank in range(ranks)]
        measured, *_ = forked_call.call_together(
            context,
            "axonlaunch.diagnostics.doctor.microbenchmarks:run_microbenchmarks",
            calls,
            task="measuring this node",
        )
    figures = {name: _rounded(value) for name, value in measured.items()}
    figures |= {
        "memory_gib": _rounded(host.memory_bytes() / ranks / GIB),
        # Measured as they are reached.
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
    return float(f"{value:.{_ROUND}g}") if isinstance(value, float) else value


def _read_kept(ranks: int) -> dict[str, Any] | None:
    try:
        measured: dict[str, Any] = json.loads(_file(ranks).read_text())
    except (OSError, ValueError):
        return None
    return measured


def _keep(ranks: int, figures: dict[str, Any]) -> None:
    cache.keep(_file(ranks), json.dumps(figures, indent=1))


def _file(ranks: int) -> Path:
    """Return where figures are kept: by processor, cores and torch, which they depend on."""
    about = (_processor(), sorted(os.sched_getaffinity(0)), version("torch"), _source())
    name = sha256(repr(about).encode()).hexdigest()[:16]
    return cache.cache_folder() / "hardware" / f"cpu_{ranks}_{name}.json"


def _processor() -> str:
    """Return the processor's name, as Linux reports it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _source() -> str:
    """Return a hash of what measures, whose figures change their meaning with it."""
    return sha256((Path(__file__).parent / "microbenchmarks.py").read_bytes()).hexdigest()
