"""The hardware by whose figures a run's step time is predicted, or why there is none."""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.config.layout import nodes, num_ranks
from axonlaunch.diagnostics.doctor import measured_hardware


def hardware_of_run(config: RunConfig) -> tuple[HardwareConfig | None, str]:
    """Return the figures of the devices that a run computes on, or None and the reason.

    Nothing is measured for it: of this node's CPU those are taken that were measured before.

    Args:
        config: Checked, with ``launch.nproc`` resolved.
    """
    hardware, ranks = config.hardware, num_ranks(config)
    if config.launch.backend == "mock":
        return None, "ranks of launch.backend=mock take turns, so their steps are not predicted"
    if hardware is None:
        return None, "the run names no hardware; hardware=h100_80gb, for one, has figures"
    if not hardware.is_cpu:
        return hardware, ""
    measured = (
        measured_hardware.known_hardware(hardware, ranks=ranks) if nodes(config)[1] == 1 else None
    )
    if measured is None:
        command = f"axonlaunch plan hardware=cpu --devices {ranks}"
        return None, f"this node was never measured with {ranks} ranks at once; {command} does"
    return measured, ""
