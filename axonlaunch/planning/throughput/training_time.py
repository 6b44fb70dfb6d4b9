"""Predicts the days, the goodput, the failures, the cost and the energy of training on some tokens.

Figures that the hardware does not have are typical ones, and are listed as assumed.
"""

from __future__ import annotations

import math
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.measured_constants import (
    DISK_GB_S,
    GPU_HOURS_PER_FAILURE,
    HOST_GB_S,
    RESTART_S,
)
from axonlaunch.planning.records import FailureRates, TrainingForecast
from axonlaunch.planning.throughput.goodput import (
    SaveCosts,
    best_interval_s,
    overheads,
    poisson_quantile,
)

_HOUR_S, _DAY_H = 3600.0, 24.0
_TAIL = 0.05
"""Probability of each of the two tails outside a band, and of too few spare nodes."""
_LEAST_GOODPUT = 0.01
"""Goodput below which a run is said to make no progress."""


def training_forecast(
    config: RunConfig, *, tokens: float, step_s: float, saved_bytes: int
) -> TrainingForecast:
    """Predict the training on a number of tokens, with a device for each rank.

    Args:
        config: Configuration with hardware, and ``launch.nproc`` resolved.
        tokens: Number of tokens to train on.
        step_s: Seconds per step.
        saved_bytes: Bytes of a checkpoint.

    Raises:
        ConfigError: The samples are not sequences of tokens, or the run fails before it saves.
    """
    hardware, devices = config.hardware, num_ranks(config)
    assert hardware is not None
    steps = steps_of_tokens(config, tokens)
    useful_s = steps * step_s
    costs = save_costs(config, saved_bytes=saved_bytes)
    rates = failure_rates(hardware, devices=devices)
    mtbf_s = rates.expected * _HOUR_S / devices
    every = round(best_interval_s(costs, mtbf_s=mtbf_s) / step_s)
    every = min(max(1, every), steps)
    expected = overheads(costs, interval_s=every * step_s, mtbf_s=mtbf_s)
    if expected.goodput < _LEAST_GOODPUT:
        message = (
            f"is in device hours: {devices:,} devices would fail every {mtbf_s:,.3g} s, and the "
            "run would make no progress, because a save with the steps before it takes "
            f"{costs.stalled_s + every * step_s:,.3g} s; write a larger number"
        )
        figure = hardware.mtbf_gpu_hours
        raise ConfigError([ConfigIssue("hardware.mtbf_gpu_hours", message, figure)])
    low, high = _band(costs, rates, useful_s=useful_s, interval_s=every * step_s, devices=devices)
    hours = useful_s / expected.goodput / _HOUR_S
    device_hours = devices * hours
    price, energy = hardware.price_per_hour, hardware.kwh_per_hour
    configured = config.checkpoint.every
    return TrainingForecast(
        tokens=tokens,
        steps=steps,
        step_s=step_s,
        devices=devices,
        days=hours / _DAY_H,
        days_at_best=useful_s / high / _HOUR_S / _DAY_H,
        days_at_worst=useful_s / low / _HOUR_S / _DAY_H,
        device_hours=device_hours,
        goodput=expected.goodput,
        goodput_low=low,
        goodput_high=high,
        saving=expected.saving * expected.goodput,
        lost=expected.lost * expected.goodput,
        restarting=expected.restarting * expected.goodput,
        failures=expected.failures * useful_s,
        hours_between_failures=mtbf_s / _HOUR_S,
        gpu_hours_per_failure=rates,
        checkpoint_every=every,
        checkpoint_bytes=saved_bytes,
        save_s=costs.written_s,
        stalled_s=costs.stalled_s,
        restart_s=costs.restart_s,
        spares=poisson_quantile(_DAY_H * _HOUR_S / mtbf_s, 1 - _TAIL),
        devices_per_spare=RunNodes.of(config, hardware).ranks,
        price=None if price is None else price * device_hours,
        mwh=None if energy is None else energy * device_hours / 1000,
        configured_every=configured if isinstance(configured, int) and configured else None,
        configured_goodput=_configured_goodput(config, costs, step_s=step_s, mtbf_s=mtbf_s),
        assumed=assumed_rates(config),
    )


def steps_of_tokens(config: RunConfig, tokens: float) -> int:
    """Return the number of steps that train on a number of tokens.

    Raises:
        ConfigError: The samples are not sequences of tokens.
    """
    if config.sequence_length is None:
        message = "counts tokens, and the samples of this data are not sequences of tokens"
        raise ConfigError([ConfigIssue("--tokens", message, f"{tokens:g}")])
    return math.ceil(tokens / (config.train.global_batch_size * config.sequence_length))


def failure_rates(hardware: HardwareConfig, *, devices: int) -> FailureRates:
    """Return the device hours for each failure: as configured, or as published for such runs.

    Between the numbers of devices with published rates, the logarithm of the rate is a line over
    that of the number.
    """
    if hardware.mtbf_gpu_hours is not None:
        rate = hardware.mtbf_gpu_hours
        return FailureRates(low=rate, expected=rate, high=rate)
    (few, small), (many, large) = sorted(GPU_HOURS_PER_FAILURE.items())
    share = math.log(min(max(devices, few), many) / few) / math.log(many / few)
    between = [a ** (1 - share) * b**share for a, b in zip(small, large, strict=True)]
    low, expected, high = between
    return FailureRates(low=low, expected=expected, high=high)


def save_costs(config: RunConfig, *, saved_bytes: float) -> SaveCosts:
    """Return the costs of saving and reading a checkpoint of a size.

    With ``checkpoint.async_save`` training waits only for the copy to host memory.

    Args:
        config: Configuration with hardware, and ``launch.nproc`` resolved.
        saved_bytes: Bytes of a checkpoint.
    """
    hardware = config.hardware
    assert hardware is not None
    nodes = RunNodes.of(config, hardware)
    disk = DISK_GB_S if hardware.disk_gb_s is None else hardware.disk_gb_s
    written_s = saved_bytes / (nodes.count * disk * 1e9)
    stalled_s = written_s
    if config.checkpoint.async_save:
        stalled_s = min(written_s, saved_bytes / num_ranks(config) / _copy_rate(hardware))
    restart_s = RESTART_S if hardware.restart_s is None else hardware.restart_s
    return SaveCosts(stalled_s=stalled_s, written_s=written_s, restart_s=restart_s + written_s)


def _copy_rate(hardware: HardwareConfig) -> float:
    """Return the rate of a rank's copies to host memory in bytes/s."""
    if _copies_like_kernels(hardware):
        return hardware.kernel_bytes[-1] / hardware.kernel_latency_us[-1] * 1e6
    host = HOST_GB_S if hardware.host_gb_s is None else hardware.host_gb_s
    return host * (hardware.host_efficiency or 1.0) * 1e9


def _copies_like_kernels(hardware: HardwareConfig) -> bool:
    """Return whether this is a CPU, which copies as fast as its kernels write new pages."""
    return hardware.host_gb_s is None and bool(hardware.kernel_bytes)


def assumed_rates(config: RunConfig) -> dict[str, Any]:
    """Return the typical figures that replace missing ones, by key; None for published rates.

    Args:
        config: Configuration with hardware.
    """
    hardware = config.hardware
    assert hardware is not None
    defaults = {"disk_gb_s": DISK_GB_S, "restart_s": RESTART_S, "mtbf_gpu_hours": None}
    if config.checkpoint.async_save and not _copies_like_kernels(hardware):
        defaults["host_gb_s"] = HOST_GB_S
    return {
        f"hardware.{name}": value
        for name, value in defaults.items()
        if getattr(hardware, name) is None
    }


def _band(
    costs: SaveCosts, rates: FailureRates, *, useful_s: float, interval_s: float, devices: int
) -> tuple[float, float]:
    """Return the goodput at the low and at the high rate of failures.

    At the low rate, the number of failures is the one that 5% of runs exceed; at the high rate, 5%
    of runs have fewer.
    """

    def goodput_at(rate: float, probability: float) -> float:
        mean = overheads(costs, interval_s=interval_s, mtbf_s=rate * _HOUR_S / devices)
        number = poisson_quantile(mean.failures * useful_s, probability)
        return mean.scaled_to(number / useful_s).goodput

    return goodput_at(rates.low, 1 - _TAIL), goodput_at(rates.high, _TAIL)


def _configured_goodput(
    config: RunConfig, costs: SaveCosts, *, step_s: float, mtbf_s: float
) -> float | None:
    """Return the goodput with the configured interval between saves; None without one in steps."""
    every = config.checkpoint.every
    if not isinstance(every, int) or not every:
        return None
    return overheads(costs, interval_s=every * step_s, mtbf_s=mtbf_s).goodput
