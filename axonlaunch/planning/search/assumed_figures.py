"""Completes hardware for a plan with defaults for unpublished figures, which are reported."""

from __future__ import annotations

import dataclasses
from typing import Any

from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.measured_constants import DEFAULT_EFFICIENCY

_USUAL_NODE = 8
"""Devices that one node is assumed to hold if ``hardware`` does not say it."""


def with_assumed_figures(
    hardware: HardwareConfig, *, devices: int | None
) -> tuple[HardwareConfig, dict[str, Any]]:
    """Return hardware with defaults for figures that it lacks, and these figures by key.

    Up to ``_USUAL_NODE`` devices are assumed to be in one node. More devices need
    ``hardware.devices_per_node`` and a network.

    Args:
        hardware: Description of the devices.
        devices: Number of devices; None if the run describes its nodes.
    """
    assumed: dict[str, Any] = {
        name: value for name, value in DEFAULT_EFFICIENCY.items() if getattr(hardware, name) is None
    }
    if devices is not None and hardware.devices_per_node is None and devices <= _USUAL_NODE:
        assumed["devices_per_node"] = devices
    completed = dataclasses.replace(hardware, **assumed)
    return completed, {f"hardware.{name}": value for name, value in assumed.items()}
