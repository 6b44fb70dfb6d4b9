"""Why a search found no layout, and what would change that.

It estimates nothing: what is said to fit is expected to by analytic formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from axonlaunch.config import ConfigIssue, RunConfig, with_values
from axonlaunch.config.errors import one_of, plain
from axonlaunch.config.hardware import GIB
from axonlaunch.planning.records import Planned
from axonlaunch.planning.search.candidates import Candidate

Fixed = Mapping[str, Any]
_TIMES = (2, 4, 8)
"""Times the devices that may do where these do not."""


def none_divides(
    config: RunConfig,
    *,
    devices: int,
    fixed: Fixed,
    listed: Callable[[RunConfig, Fixed], Iterable[Candidate]],
) -> ConfigIssue:
    """Say that no layout divides the devices, the model and the batch.

    Args:
        config: The run.
        devices: Ranks.
        fixed: What the user has set of the layout.
        listed: Lists the layouts of a run in which some settings are fixed.
    """
    key, batch = "train.global_batch_size", config.train.global_batch_size
    message = (
        f"no layout of {_devices_text(devices)} divides the model and a batch of {batch} samples"
    )
    if not fixed:
        return ConfigIssue(key, f"{message}; use a multiple of {devices}", batch)
    message += " with " + " ".join(_setting_text(name, value) for name, value in fixed.items())
    for name, value in fixed.items():
        values = dict.fromkeys(c.settings[name] for c in listed(config, _without(fixed, name)))
        if values:
            return ConfigIssue(name, f"{message}; use {one_of([*values])}", value)
    if any(True for _ in listed(with_values(config, {key: batch * devices}), fixed)):
        return ConfigIssue(key, f"{message}; use {batch * devices}", batch)
    return ConfigIssue(key, f"{message}; remove some of these settings", batch)


def none_fits(
    config: RunConfig,
    tried: Sequence[Planned],
    *,
    devices: int,
    searched: int,
    fixed: Fixed,
    fits: Callable[[int, Fixed], bool],
) -> ConfigIssue:
    """Say that no layout fits: the closest of those estimated, what it misses, and what may do.

    Args:
        config: The run.
        tried: Layouts that were estimated.
        devices: Ranks.
        searched: Layouts that were looked at.
        fixed: What the user has set of the layout.
        fits: Whether some layout of so many devices is expected to, with some settings fixed.
    """
    assert config.hardware is not None
    assert config.hardware.memory_gib is not None
    closest = min(tried, key=lambda planned: (planned.needs_more_host, planned.process_bytes))
    memory, margin = config.hardware.memory_gib, config.estimate.margin
    room, takes = memory / (1 + margin), closest.process_bytes / GIB
    misses = (
        f"takes {takes:.2f} GiB, {takes - room:.2f} more than an estimate may take of a device's "
        f"{memory:g} (estimate.margin={margin:g})"
    )
    if closest.host_memory is not None and closest.needs_more_host:
        misses = (
            f"offloads {closest.host_memory.bytes_per_node / GIB:.1f} GiB, more than a node has"
        )
    message = (
        f"no layout of {_devices_text(devices)} fits: {searched:,} were looked at and {len(tried)} "
        f"estimated, and the closest, {closest.layout}, {misses}; "
    )
    remedies = [
        f"remove {_setting_text(key, value)}"
        for key, value in fixed.items()
        if fits(devices, _without(fixed, key))
    ] or [f"use {times * devices} devices" for times in _TIMES if fits(times * devices, fixed)]
    usual = "use more devices or a smaller batch or sequence"
    message += f"{remedies[0]}: a layout is expected to fit then" if remedies else usual
    return ConfigIssue("hardware", message, config.hardware.name)


def _without(fixed: Fixed, key: str) -> Fixed:
    return {name: value for name, value in fixed.items() if name != key}


def _setting_text(key: str, value: Any) -> str:
    return f"{key}={plain(value)}"


def _devices_text(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
