"""Derives the figures of ``HardwareConfig`` from times measured on this node's GPUs.

These are the inverse of the formulas of ``roofline`` and ``collectives``. Peaks and bandwidths that
are published for the device are kept, so that MFU refers to them, and the efficiencies are
measured. Figures that are not published are the measured rates, with an efficiency of 1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.options.hardware import GIB, HardwareConfig
from axonlaunch.planning.measured_constants import (
    COLLECTIVE_S,
    HALF_DEPTH,
    HALF_LENGTH,
    HALF_WAVE,
)
from axonlaunch.planning.throughput.roofline import num_waves
from axonlaunch.system.text.formatting import MIB

_DIGITS = 4
"""Significant digits of measured figures."""
_FASTEST_LATENCY_S = 1e-7
"""Lower limit of the latency of a link: a collective may start faster than is assumed."""


def hardware_from_times(
    measured: Mapping[str, Any],
    *,
    name: str,
    ranks: int,
    gpus: int,
    published: HardwareConfig | None,
) -> HardwareConfig:
    """Return the hardware of measured GPUs.

    Args:
        measured: Result of ``diagnostics.doctor.gpu_benchmarks``.
        name: Name of the hardware.
        ranks: Number of GPUs that were measured together.
        gpus: Number of GPUs of the node.
        published: Published figures of the device; None if there are none.
    """
    nominal = published or HardwareConfig(name=name)
    timed = measured["timed"]
    launch = next(work["seconds"] for work in timed if work["kind"] == "launch")
    figures: dict[str, Any] = {
        "name": name,
        "device": f"^{re.escape(measured['device'])}$",
        "memory_gib": measured["memory_bytes"] / GIB,
        "multiprocessors": measured["multiprocessors"],
        "context_mib": measured["context_bytes"] / MIB,
        "kernel_us": launch * 1e6,
        "devices_per_node": nominal.devices_per_node or gpus,
    }
    peaks, efficiency = _product_figures(timed, nominal, measured["multiprocessors"], launch)
    figures |= {**peaks, "matrix_efficiency": efficiency}
    peak = peaks.get("bf16_tflops") or peaks["fp16_tflops"]
    [attention] = [work for work in timed if work["kind"] == "attention"]
    figures["attention_efficiency"] = min(1.0, _attention_tflops(attention, launch) / peak)
    kernels = [work for work in timed if work["kind"] == "kernel"]
    moved = sum(work["bytes"] for work in kernels)
    seconds = sum(work["seconds"] - launch for work in kernels)
    figures |= _rate("memory_bandwidth_gb_s", "memory_efficiency", moved / seconds / 1e9, nominal)
    [host] = [work for work in timed if work["kind"] == "host"]
    figures |= _rate("host_gb_s", "host_efficiency", host["bytes"] / host["seconds"] / 1e9, nominal)
    if ranks > 1:
        figures |= _link_figures(timed, nominal, ranks)
        figures["communicator_mib"] = measured["communicator_bytes"] / MIB
    for work in timed:
        if work["kind"] == "disk":
            figures["disk_gb_s"] = ranks * work["bytes"] / work["seconds"] / 1e9
    rounded: dict[str, Any] = {
        key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }
    return dataclasses.replace(nominal, **rounded)


def _product_figures(
    timed: list[dict[str, Any]], nominal: HardwareConfig, multiprocessors: int, launch: float
) -> tuple[dict[str, float], float]:
    """Return the peaks of products, and the fraction of them that the best shapes reach."""
    reached: dict[str, float] = {}
    for work in timed:
        if work["kind"] == "product":
            m, n, k = (work[size] for size in "mnk")
            waves = num_waves(1, m, n, multiprocessors)
            share = waves / (waves + HALF_WAVE) * k / (k + HALF_DEPTH)
            rate = 2 * m * n * k / (work["seconds"] - launch) / share / 1e12
            reached[work["peak"]] = max(rate, reached.get(work["peak"], 0.0))
    reference = "bf16_tflops" if "bf16_tflops" in reached else "fp16_tflops"
    peak = getattr(nominal, reference)
    efficiency = 1.0 if peak is None else min(1.0, reached[reference] / peak)
    peaks = {key: getattr(nominal, key) or rate / efficiency for key, rate in reached.items()}
    return peaks, efficiency


def _attention_tflops(work: Mapping[str, Any], launch: float) -> float:
    """Return the rate of causal attention on long sequences, forward and backward."""
    positions = work["positions"]
    forward = 4 * work["heads"] * positions**2 * work["head_dim"] / 2
    share = positions / (positions + HALF_LENGTH)
    seconds = work["seconds"] - 2 * launch
    return float(3.5 * forward / seconds / share / 1e12)


def _link_figures(
    timed: list[dict[str, Any]], nominal: HardwareConfig, ranks: int
) -> dict[str, float]:
    small, large = (work for work in timed if work["kind"] == "all_reduce")
    [gather] = [work for work in timed if work["kind"] == "all_gather"]
    hops = 2 * (ranks - 1)
    latency = max(_FASTEST_LATENCY_S, (small["seconds"] - COLLECTIVE_S) / hops)
    started, share = COLLECTIVE_S + hops * latency, (ranks - 1) / ranks
    rate = 2 * share * large["bytes"] / (large["seconds"] - started) / 1e9
    gathered = share * gather["bytes"] / (gather["seconds"] - COLLECTIVE_S - hops / 2 * latency)
    figures = {"link_latency_us": latency * 1e6}
    figures |= _rate("link_gb_s", "link_efficiency", rate, nominal)
    if gathered / 1e9 < rate:
        figures["allgather_bw_gb_s"] = gathered / 1e9
    return figures


def _rate(name: str, efficiency: str, rate: float, nominal: HardwareConfig) -> dict[str, float]:
    """Return a published figure and the fraction of it that was reached, or the measured rate."""
    figure = getattr(nominal, name)
    if figure is None:
        return {name: rate, efficiency: 1.0}
    return {name: figure, efficiency: min(1.0, rate / figure)}
