"""Benchmarks of simulated GPUs, and the hardware figures that are derived from their times.

Work runs on meta tensors, and a clock gives the times of the formulas of ``plan`` for a GPU with
known figures. The derived figures must be those of the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from axonlaunch.cli.configuration import doctor
from axonlaunch.config import Composer, ConfigError, load
from axonlaunch.config.options.hardware import GIB, HardwareConfig
from axonlaunch.diagnostics.doctor import diagnose
from axonlaunch.diagnostics.doctor.gpu_benchmarks import time_kernels, time_links
from axonlaunch.planning.measured_constants import IN_A_STEP
from axonlaunch.planning.throughput.collectives import Links
from axonlaunch.planning.throughput.measured_gpus import hardware_from_times
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    CollectiveOp,
    Kernel,
    Product,
)
from axonlaunch.planning.throughput.roofline import Roofline
from axonlaunch.system.text.formatting import MIB

RANKS = 8
META = torch.device("meta")
DTYPES = {
    "fp32_tflops": torch.float32,
    "tf32_tflops": torch.float32,
    "bf16_tflops": torch.bfloat16,
    "fp16_tflops": torch.float16,
}


class SimulatedGPU:
    """A GPU on which work takes the time of the formulas of ``plan``."""

    def __init__(self, hardware: HardwareConfig) -> None:
        self.hardware = hardware
        self.flops: dict[str, list[tuple[float, int]]] = {}

    def clock(self, run: Callable[[], object], sizes: dict[str, Any]) -> float:
        """Run work on meta tensors, and return the seconds that the GPU would need."""
        kind = sizes["kind"]
        if kind not in ("all_reduce", "all_gather"):
            with FlopCounterMode(display=False) as counter:
                run()
            self.flops.setdefault(kind, []).append((counter.get_total_flops(), sizes))
        return float(getattr(self, f"_{kind}_seconds")(**sizes))

    def _roofline(self, peak: str = "") -> Roofline:
        return Roofline(
            self.hardware, matmul_precision="high" if peak == "tf32_tflops" else "highest"
        )

    def _product_seconds(self, peak: str, m: int, n: int, k: int, **_: Any) -> float:
        product = Product("forward", 1, m, n, k, DTYPES[peak])
        launch = self.hardware.kernel_us * 1e-6
        in_a_step = self._roofline(peak).seconds(product, Amount(1))
        return (in_a_step - launch) * IN_A_STEP + launch

    def _attention_seconds(self, heads: int, positions: int, head_dim: int, **_: Any) -> float:
        forward = 4 * heads * positions**2 * head_dim / 2
        operation = AttentionOp("forward", heads, positions, positions, head_dim, torch.bfloat16)
        amounts = [Amount(1, 0, times * forward) for times in (1, 2.5)]
        return sum(self._roofline().seconds(operation, amount) for amount in amounts)

    def _kernel_seconds(self, **sizes: Any) -> float:
        return self._roofline().seconds(Kernel("forward", ""), Amount(1, sizes["bytes"]))

    def _launch_seconds(self, **_: Any) -> float:
        return self.hardware.kernel_us * 1e-6

    def _host_seconds(self, **sizes: Any) -> float:
        hardware = self.hardware
        assert hardware.host_gb_s is not None
        assert hardware.host_efficiency is not None
        return float(sizes["bytes"] / (hardware.host_gb_s * hardware.host_efficiency * 1e9))

    def _all_reduce_seconds(self, kind: Any, ranks: int, **sizes: Any) -> float:
        links = Links(self.hardware, {"dp_shard": ranks}, ranks_per_node=ranks)
        return links.seconds(
            CollectiveOp("backward", kind, ("dp_shard",)), Amount(1, sizes["bytes"])
        )

    _all_gather_seconds = _all_reduce_seconds

    def measured(self, *, ranks: int = RANKS) -> dict[str, Any]:
        """Return the result of the benchmarks."""
        timed = list(time_kernels(META, self.clock, has_bf16=True))
        if ranks > 1:
            timed += time_links(META, self.clock_without_running, ranks=ranks)
        return {
            "timed": timed,
            "device": "Simulated (X1)",
            "memory_bytes": int(79.5 * GIB),
            "multiprocessors": self.hardware.multiprocessors,
            "context_bytes": 600 * MIB,
            "communicator_bytes": 300 * MIB,
        }

    def clock_without_running(self, run: Callable[[], object], sizes: dict[str, Any]) -> float:
        """Return the seconds of a collective, for which meta tensors have no ranks."""
        del run
        return self.clock(lambda: None, sizes)


def option(name: str) -> HardwareConfig:
    return HardwareConfig(**Composer().contents("hardware")[name])


@pytest.fixture(scope="module")
def slow_h100() -> SimulatedGPU:
    """An H100 that reaches less of its peaks than is published."""
    return SimulatedGPU(
        dataclasses.replace(
            option("h100_80gb"),
            matrix_efficiency=0.7,
            attention_efficiency=0.4,
            memory_efficiency=0.8,
            kernel_us=3.0,
            link_efficiency=0.6,
            link_latency_us=4.0,
            host_efficiency=0.5,
        )
    )


def test_measured_efficiencies_are_those_of_the_device(slow_h100: SimulatedGPU) -> None:
    measured = hardware_from_times(
        slow_h100.measured(), name="own", ranks=RANKS, gpus=8, published=option("h100_80gb")
    )
    expected = dataclasses.replace(
        slow_h100.hardware,
        name="own",
        device=r"^Simulated\ \(X1\)$",
        memory_gib=79.5,
        context_mib=600.0,
        communicator_mib=300.0,
    )
    for field in dataclasses.fields(HardwareConfig):
        value = getattr(expected, field.name)
        if isinstance(value, float):
            value = pytest.approx(value, rel=0.01)
        assert getattr(measured, field.name) == value, field.name


def test_device_without_published_figures_gets_the_rates_that_it_reaches(
    slow_h100: SimulatedGPU,
) -> None:
    measured = hardware_from_times(
        slow_h100.measured(), name="own", ranks=RANKS, gpus=RANKS + 2, published=None
    )
    assert measured.matrix_efficiency == measured.memory_efficiency == 1
    assert measured.bf16_tflops == pytest.approx(0.7 * 989, rel=0.01)
    assert measured.memory_bandwidth_gb_s == pytest.approx(0.8 * 3350, rel=0.01)
    assert measured.link_gb_s == pytest.approx(0.6 * 450, rel=0.01)
    assert measured.devices_per_node == RANKS + 2


def test_work_has_the_stated_flops(slow_h100: SimulatedGPU) -> None:
    slow_h100.flops.clear()
    slow_h100.measured()
    for counted, sizes in slow_h100.flops["product"]:
        assert counted == 2 * sizes["m"] * sizes["n"] * sizes["k"]
    [(counted, sizes)] = slow_h100.flops["attention"]
    # Meta tensors have products of all pairs of positions, and backward has twice the forward's.
    # Fused kernels compute half of the pairs, and backward computes the scores again: 2.5 times.
    pairs = sizes["positions"] ** 2
    assert counted == 3 * 4 * sizes["heads"] * pairs * sizes["head_dim"]


def test_the_slowest_gpu_counts(slow_h100: SimulatedGPU) -> None:
    fast = SimulatedGPU(option("h100_80gb"))
    disk = {"kind": "disk", "bytes": 8, "seconds": 1.0}
    results = [fast.measured(), slow_h100.measured()]
    results[0]["timed"].append(disk)  # the other GPU's process could not write
    combined = diagnose.slowest(results)
    assert combined["timed"] == results[1]["timed"]


def test_doctor_writes_hardware_that_a_run_can_select(
    slow_h100: SimulatedGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    report = {
        "python": "3",
        "torch": "2",
        "platform": "",
        "cores": 2,
        "memory_gib": 8.0,
        "devices": [],
        "driver": None,
        "accelerator": None,
        "nccl": {"available": False},
        "backends": {},
        "disk_free_gib": 1.0,
        "run_folder": str(tmp_path),
        "timed": slow_h100.measured() | {"device": "NVIDIA H100 80GB HBM3"},
        "measured_ranks": RANKS,
    }
    monkeypatch.setattr(diagnose, "diagnose", lambda *_, **__: report)
    file = tmp_path / "hardware" / "own.yaml"
    doctor.command(measure=True, write=file)
    output = capsys.readouterr().out
    assert f"axonlaunch plan --config-dir {tmp_path} hardware=own" in output
    assert re.search(r"matmul +fp32 46.9 TFLOP/s.*: 70% of the peak", output)
    hardware = load(["hardware=own"], config_dirs=[tmp_path]).hardware
    assert hardware is not None
    assert hardware.matrix_efficiency == pytest.approx(0.7, rel=0.01)
    assert hardware.network_gb_s == option("h100_80gb").network_gb_s


def test_a_file_for_gpus_is_refused_before_a_node_without_gpus_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnose.forkserver, "warm", contextlib.nullcontext)
    monkeypatch.setattr(diagnose.forked_call, "call", lambda *_, **__: {"devices": []})
    with pytest.raises(ConfigError, match=r"own.yaml: is for GPUs, and this node has none"):
        diagnose.diagnose(tmp_path, measures=True, write=tmp_path / "hardware" / "own.yaml")
