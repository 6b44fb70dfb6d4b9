"""Finds the option of the group ``hardware`` that describes the devices of this node.

A GPU is recognized by its name. A GPU that no option describes is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch.config import Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import is_on_cpu
from axonlaunch.config.options.launch import LAUNCHERS
from axonlaunch.config.problems.errors import one_of
from axonlaunch.diagnostics.doctor.measured_hardware import processor_name
from axonlaunch.system.processes import forked_call

AUTO = "auto"
"""Option of the group ``hardware`` that is replaced by the one that this module finds."""


def asks_for_hardware(config: RunConfig) -> bool:
    """Return whether the hardware of a run is ``hardware=auto``."""
    return config.hardware is not None and config.hardware.name == AUTO


def with_found_hardware(
    overrides: Sequence[str],
    config: RunConfig,
    *,
    context: ForkServerContext,
    config_dirs: Sequence[Path],
) -> list[str]:
    """Return overrides with the devices of this node in place of ``hardware=auto``, and print them.

    Args:
        overrides: Overrides of a run.
        config: Configuration of the run.
        context: Context of the warm fork server.
        config_dirs: Folders with the user's YAML files.

    Raises:
        ConfigError: No option describes the devices.
    """
    devices = device_names(context, config)
    option = hardware_option(devices, config, config_dirs, setting=f"hardware={AUTO}")
    found = f"{len(devices)} x {devices[0]}" if devices else processor_name()
    print(f"hardware={option}: found {found}", file=sys.stderr)
    others = [word for word in overrides if word.lstrip("+") != f"hardware={AUTO}"]
    return [*others, f"hardware={option}"]


def option_of_device(device: str, options: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the first option that describes a device, by torch's name of it.

    Args:
        device: Name of the device.
        options: Contents of the options of the group ``hardware``, by name.
    """
    for name, tree in options.items():
        if (pattern := tree.get("device")) and re.search(str(pattern), device):
            return name
    return None


def device_names(context: ForkServerContext, config: RunConfig) -> list[str]:
    """Return the names of this node's devices that the run would use; empty on a CPU."""
    if is_on_cpu(config.launch):
        return []
    target = "axonlaunch.diagnostics.doctor.machine:machine"
    machine: dict[str, Any] = forked_call.call(context, target, task="looking at this node")
    return [device["name"] for device in machine["devices"]] if machine["nccl"]["devices"] else []


def hardware_option(
    devices: Sequence[str],
    config: RunConfig,
    config_dirs: Sequence[Path],
    *,
    setting: str = "strategy=auto",
) -> str:
    """Return the option of the group ``hardware`` that describes the nodes of a run.

    Args:
        devices: Names of the devices of this node; empty on a CPU.
        config: Configuration of the run.
        config_dirs: Folders with the user's YAML files.
        setting: Setting that needs the figures, for messages.

    Raises:
        ConfigError: No option describes them.
    """
    options = Composer(config_dirs=config_dirs).contents("hardware")
    launcher = LAUNCHERS.facts(config.launch.name)
    if launcher is not None and not launcher.on_this_node:
        reason = "the job runs on other nodes"
    elif len(set(devices)) > 1:
        reason = f"those of this node differ: {', '.join(sorted(set(devices)))}"
    elif not devices:
        return "cpu"
    else:
        if (found := option_of_device(devices[0], options)) is not None:
            return found
        reason = f"{devices[0]} is not in the catalog"
    usable = one_of([name for name in options if name != AUTO])
    message = f"{setting} needs figures of the devices, and {reason}; use {usable}"
    raise ConfigError([ConfigIssue("hardware", message)])
