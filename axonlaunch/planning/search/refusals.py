"""Explains why a search found no layout, and suggests a change.

Suggested changes are expected to fit according to formulas. They are not estimated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.consistency.run_nodes import uneven_devices
from axonlaunch.config.options.adapter import LoraConfig
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.precision import NUMBER_FORMATS, PRECISIONS
from axonlaunch.config.problems.errors import one_of, plain
from axonlaunch.planning.records import Planned
from axonlaunch.planning.search import keys
from axonlaunch.planning.search.candidates import Candidate

Fixed = Mapping[str, Any]
_MULTIPLES = tuple(2**n for n in range(1, 11))
"""Multiples of the number of devices that may be suggested."""
_MOST_MULTIPLES = 4
"""Number of these that are tried."""
_HALVINGS = 3
"""How often a sequence may be halved in a suggestion."""


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
        f"no layout of {_devices_text(devices)} splits the model and a batch of {batch} samples"
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
    fits: Callable[[RunConfig, int, Fixed], bool],
    lowered: RunConfig | None = None,
    not_tried: Sequence[ConfigIssue] = (),
) -> ConfigIssue:
    """Return the problem that no layout fits, with the closest one and changes of each kind.

    Args:
        config: Configuration of the run.
        tried: Estimated layouts.
        devices: Number of devices.
        searched: Number of layouts considered.
        fixed: Layout settings of the user.
        fits: Function that returns whether a layout is expected to fit, given a configuration, a
            number of devices and fixed settings. It may raise ``ConfigError``.
        lowered: The run as ``--allow low_precision`` may change it; None if that changes nothing.
        not_tried: Why changes of numerics were not searched.
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
    sentences = [
        f"no layout of {_devices_text(devices)} fits: {searched:,} considered, {len(tried)} "
        "estimated",
        f"The closest is {closest.layout}",
        f"It {shortfall}",
    ]
    changes = [
        f"removing {_setting_text(key, value)}"
        for key, value in fixed.items()
        if fits(config, devices, _without(fixed, key))
    ]
    # Half of these devices would have too little memory even if all of it were divided.
    likely = (
        n * devices
        for n in _MULTIPLES
        if 2 * n * room >= takes and uneven_devices(config, n * devices) is None
    )
    counts = (n for n in itertools.islice(likely, _MOST_MULTIPLES) if fits(config, n, fixed))
    changes += [_devices_text(count) for count in itertools.islice(counts, 1)]
    on_host = {**fixed, keys.OFFLOAD: "full"}
    offloads = keys.OFFLOAD not in fixed and config.hardware.host_gb_s is not None
    if offloads and _can_fit(config, devices, on_host, fits):
        setting = _setting_text(keys.OFFLOAD, "full")
        changes.append(f"{setting} (updates on the host, whose time plan can't predict)")
    if lowered is not None and _can_fit(lowered, devices, fixed, fits):
        changes.append(f"--allow {keys.LOW_PRECISION} (changes numerics)")
    for options in (_shared_batch(config, devices), *_smaller_runs(config)):
        values = (option for option in options if _can_fit(option.config, devices, fixed, fits))
        changes += [option.text for option in itertools.islice(values, 1)]
    if changes:
        sentences.append(f"A layout is expected to fit with {one_of(changes)}")
    else:
        sentences.append("Use more devices or a smaller batch or sequence")
    if not_tried:
        sentences.append(f"Not searched: {'; '.join(map(str, not_tried))}")
    return ConfigIssue("hardware", ". ".join(sentences), config.hardware.name)


@dataclass(frozen=True)
class _Smaller:
    """A run that needs less memory, and the overrides that make it."""

    config: RunConfig
    text: str


def _shared_batch(config: RunConfig, devices: int) -> list[_Smaller]:
    """Return the run with the next batch that all devices can share, if they can't share this."""
    key, batch = "train.global_batch_size", config.train.global_batch_size
    missing = -batch % devices
    return [_with_setting(config, key, batch + missing)] if missing else []


def _smaller_runs(config: RunConfig) -> Iterator[list[_Smaller]]:
    """Yield changes of one setting each, the smallest change first."""
    length = config.sequence_length
    if length is not None:
        shorter = [length // 2**n for n in range(1, _HALVINGS + 1) if length % 2**n == 0]
        yield [_with_setting(config, "data.sequence_length", value) for value in shorter]
    precision = PRECISIONS[config.train.precision]
    low = precision.compute
    is_stored = NUMBER_FORMATS[config.train.param_dtype].is_low
    if low.is_low and not is_stored and not precision.needs_loss_scale:
        yield [_with_setting(config, "train.param_dtype", low.name)]
    if config.adapter is None:
        changed = with_values(config, {"adapter": LoraConfig()})
        yield [_Smaller(changed, "adapter=lora")]


def _with_setting(config: RunConfig, key: str, value: Any) -> _Smaller:
    return _Smaller(with_values(config, {key: value}), _setting_text(key, value))


def _can_fit(
    config: RunConfig,
    devices: int,
    fixed: Fixed,
    fits: Callable[[RunConfig, int, Fixed], bool],
) -> bool:
    """Return whether a changed run can be built and is expected to fit."""
    try:
        return fits(config, devices, fixed)
    except ConfigError:
        return False


def _without(fixed: Fixed, key: str) -> Fixed:
    return {name: value for name, value in fixed.items() if name != key}


def _setting_text(key: str, value: Any) -> str:
    return f"{key}={plain(value)}"


def _devices_text(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
