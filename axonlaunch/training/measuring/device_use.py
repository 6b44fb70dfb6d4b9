"""Reads an accelerator's allocator statistics and NVML counters while a run trains.

All counters are available on the host, so reading them does not wait for the device.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any

import torch

from axonlaunch.config.composition.compose import packaged_configs
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.schema import TrainConfig
from axonlaunch.config.values.plain_values import read_yaml

_NVML: dict[str, tuple[Callable[..., float], float]] = {
    "power_w": (lambda device: torch.cuda.power_draw(device), 1e-3),
    "utilization": (lambda device: torch.cuda.utilization(device), 1e-2),
    "temperature_c": (lambda device: torch.cuda.temperature(device), 1.0),
}
"""Maps the name of a field to a query and to the factor that converts its result."""
_ALLOCATOR = {
    "reserved_bytes": "reserved_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


class DeviceUse:
    """Reads the counters of a device.

    Attributes:
        notes: Counters that are not available, each with the reason.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        flops_per_step: float | None = None,
        peak: float | None = None,
        devices: int = 1,
    ) -> None:
        """Find out which counters the device has. A CPU has none.

        Args:
            device: Device of this rank.
            flops_per_step: Model FLOPs of a step for all positions, including padding and positions
                without a target in the loss; None if unknown.
            peak: Peak FLOP/s of one device, as returned by ``peak_flops``; None if unknown.
            devices: Number of devices in the world.
        """
        self._device = device
        self._shortest_s = None  # time of a step at an MFU of 1
        if flops_per_step is not None and peak is not None:
            self._shortest_s = flops_per_step / devices / peak
        self._is_cuda = device.type == "cuda"
        self._queries = dict(_NVML)
        self.notes: tuple[str, ...] = ()
        if self._is_cuda and torch.version.hip is None and not importlib.util.find_spec("pynvml"):
            self._leave_out([*_NVML], "pip install nvidia-ml-py")
        self.read(step_s=math.inf)  # finds unavailable counters at the start

    def read(self, *, step_s: float) -> dict[str, Any]:
        """Return values by field name of a logged step.

        Args:
            step_s: Duration of a step in seconds.
        """
        if not self._is_cuda:
            return {}
        stats = torch.cuda.memory_stats(self._device)
        figures: dict[str, Any] = {name: stats.get(key, 0) for name, key in _ALLOCATOR.items()}
        if self._shortest_s is not None:
            figures["mfu"] = self._shortest_s / step_s
        for name, (query, factor) in list(self._queries.items()):
            try:
                figures[name] = query(self._device) * factor
            except Exception as error:  # errors of pynvml: drivers and MIG slices may refuse any
                self._leave_out([name], str(error))
        return figures

    def _leave_out(self, names: list[str], reason: str) -> None:
        for name in names:
            del self._queries[name]
        self.notes = (*self.notes, f"not logged: {', '.join(names)} ({reason})")


def peak_flops(hardware: HardwareConfig | None, config: TrainConfig) -> float | None:
    """Return the dense peak FLOP/s of the run's arithmetic, relative to which MFU is computed.

    Args:
        hardware: Hardware of the run or of its device; None if unknown.
        config: Training configuration, which determines the arithmetic.

    Returns:
        The peak, or None if it is unknown.
    """
    if hardware is None:
        return None
    tflops = getattr(
        hardware,
        hardware.peak_figure(precision=config.precision, matmul_precision=config.matmul_precision),
    )
    return None if tflops is None else tflops * 1e12


def hardware_of(device: torch.device) -> HardwareConfig | None:
    """Return the catalog entry of an accelerator, found by its name in torch; None if missing."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for file in sorted((packaged_configs() / "hardware").glob("*.yaml")):
        tree: dict[str, Any] = read_yaml(file.read_text())
        if (pattern := tree.get("device")) and re.search(str(pattern), name):
            return HardwareConfig(**tree)
    return None
