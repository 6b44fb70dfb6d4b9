"""What an accelerator is used for while a run trains: its allocator, and what NVML reports.

It reads counters that the host has already; nothing here waits for the device.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any

import torch

from axonlaunch.config.compose import packaged_configs
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.config.plain import read_yaml
from axonlaunch.config.schema import TrainConfig

_NVML: dict[str, tuple[Callable[..., float], float]] = {
    "power_w": (lambda device: torch.cuda.power_draw(device), 1e-3),
    "utilization": (lambda device: torch.cuda.utilization(device), 1e-2),
    "temperature_c": (lambda device: torch.cuda.temperature(device), 1.0),
}
"""Name to what asks for it, and the factor that makes the name's unit of its answer."""
_ALLOCATOR = {
    "reserved_bytes": "reserved_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


class DeviceUse:
    """Reads what a device reports of itself.

    Attributes:
        notes: What is not reported, and why.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        flops_per_step: float | None = None,
        peak: float | None = None,
        devices: int = 1,
    ) -> None:
        """Find out what the device reports; a CPU nothing.

        Args:
            device: This rank's.
            flops_per_step: That the model needs for all positions of a step, padding and what is
                not counted in the loss too; None: they are not known.
            peak: FLOP/s of one device, as ``peak_flops`` returns it.
            devices: Of the world.
        """
        self._device = device
        self._shortest_s = None  # a step's, at an MFU of 1
        if flops_per_step is not None and peak is not None:
            self._shortest_s = flops_per_step / devices / peak
        self._is_cuda = device.type == "cuda"
        self._asked = dict(_NVML)
        self.notes: tuple[str, ...] = ()
        if self._is_cuda and torch.version.hip is None and not importlib.util.find_spec("pynvml"):
            self._leave_out([*_NVML], "pip install nvidia-ml-py")
        self.read(step_s=math.inf)  # so that what the device refuses is known at the start

    def read(self, *, step_s: float) -> dict[str, Any]:
        """Return numbers by the names of a logged step's fields.

        Args:
            step_s: Seconds that a step took.
        """
        if not self._is_cuda:
            return {}
        stats = torch.cuda.memory_stats(self._device)
        figures: dict[str, Any] = {name: stats.get(key, 0) for name, key in _ALLOCATOR.items()}
        if self._shortest_s is not None:
            figures["mfu"] = self._shortest_s / step_s
        for name, (ask, factor) in list(self._asked.items()):
            try:
                figures[name] = ask(self._device) * factor
            except Exception as error:  # pynvml's classes; a driver or a MIG slice may refuse any
                self._leave_out([name], str(error))
        return figures

    def _leave_out(self, names: list[str], reason: str) -> None:
        for name in names:
            del self._asked[name]
        self.notes = (*self.notes, f"not logged: {', '.join(names)} ({reason})")


def peak_flops(hardware: HardwareConfig | None, config: TrainConfig) -> float | None:
    """Return the FLOP/s that MFU is a share of: the dense peak of the run's arithmetic.

    Args:
        hardware: The run's, or what is known of its device.
        config: Which arithmetic.

    Returns:
        None where nobody published it.
    """
    if hardware is None:
        return None
    tflops = getattr(
        hardware,
        hardware.peak_figure(precision=config.precision, matmul_precision=config.matmul_precision),
    )
    return None if tflops is None else tflops * 1e12


def hardware_of(device: torch.device) -> HardwareConfig | None:
    """Return what our catalog has of an accelerator, by the name that torch gives it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for file in sorted((packaged_configs() / "hardware").glob("*.yaml")):
        tree: dict[str, Any] = read_yaml(file.read_text())
        if (pattern := tree.get("device")) and re.search(str(pattern), name):
            return HardwareConfig(**tree)
    return None
