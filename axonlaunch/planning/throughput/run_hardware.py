"""Finds the hardware figures for predicting a run's step time."""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import nodes, num_ranks
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.diagnostics.doctor import measured_hardware


def hardware_of_run(config: RunConfig) -> tuple[HardwareConfig | None, str]:
    """Return the figures of a run's devices, or None and the reason.

    Nothing is measured. For a CPU, figures from an earlier measurement of this node are used.

    Args:
        config: Checked configuration with ``launch.nproc`` resolved.
    """
    hardware, ranks = config.hardware, num_ranks(config)
    if config.launch.backend == "mock":
        return None, "ranks of launch.backend=mock take turns, so their steps are slower"
    if hardware is None:
        return None, "set hardware=..., for example hardware=h100_80gb"
    if not hardware.is_cpu:
        return hardware, ""
    measured = (
        measured_hardware.known_hardware(hardware, ranks=ranks) if nodes(config)[1] == 1 else None
    )
    if measured is None:
        command = f"axonlaunch plan hardware=cpu --devices {ranks}"
        count = "1 rank" if ranks == 1 else f"{ranks} ranks"
        return None, f"this node was never measured with {count}; {command} measures it"
    return measured, ""
