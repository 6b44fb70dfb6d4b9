"""Explains why a search found no layout, and suggests a change.

Suggested changes are expected to fit according to formulas. They are not estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from axonlaunch.config import ConfigIssue, RunConfig, with_values
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.problems.errors import one_of, plain
from axonlaunch.planning.records import Planned
from axonlaunch.planning.search.candidates import Candidate

Fixed = Mapping[str, Any]
_MULTIPLES = (2, 4, 8)
"""Multiples of the number of devices to suggest."""


def none_divides(
    config: RunConfig,
    *,
    devices: int,
    fixed: Fixed,
    listed: Callable[[RunConfig, Fixed], Iterable[Candidate]],
) -> ConfigIssue:
    """Return the problem that no layout divides the devices, the model and the batch.

    Args:
        config: Configuration of the run.
        devices: Number of devices.
        fixed: Layout settings of the user.
        listed: Function that lists the layouts of a run with fixed settings.
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
    """Return the problem that no layout fits, with the closest one and a suggestion.

    Args:
        config: Configuration of the run.
        tried: Estimated layouts.
        devices: Number of devices.
        searched: Number of layouts considered.
        fixed: Layout settings of the user.
        fits: Function that returns whether a layout is expected to fit, given a number of devices
            and fixed settings.
    """
    assert config.hardware is not None
    assert config.hardware.memory_gib is not None
    closest = min(tried, key=lambda planned: (planned.needs_more_host, planned.process_bytes))
    memory, margin = config.hardware.memory_gib, config.estimate.margin
    room, takes = memory / (1 + margin), closest.process_bytes / GIB
    shortfall = (
        f"takes {takes:.2f} GiB, {takes - room:.2f} more than a device of {memory:g} GiB allows "
        f"(estimate.margin={margin:g})"
    )
    if closest.host_memory is not None and closest.needs_more_host:
        shortfall = (
            f"offloads {closest.host_memory.bytes_per_node / GIB:.1f} GiB, more than a node has"
        )
    message = (
        f"no layout of {_devices_text(devices)} fits: {searched:,} considered, {len(tried)} "
        f"estimated. The closest, {closest.layout}, {shortfall}; "
    )
    remedies = [
        f"remove {_setting_text(key, value)}"
        for key, value in fixed.items()
        if fits(devices, _without(fixed, key))
    ] or [f"use {times * devices} devices" for times in _MULTIPLES if fits(times * devices, fixed)]
    general_advice = "use more devices or a smaller batch or sequence"
    message += f"{remedies[0]}: a layout is expected to fit then" if remedies else general_advice
    return ConfigIssue("hardware", message, config.hardware.name)


def _without(fixed: Fixed, key: str) -> Fixed:
    return {name: value for name, value in fixed.items() if name != key}


def _setting_text(key: str, value: Any) -> str:
    return f"{key}={plain(value)}"


def _devices_text(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
