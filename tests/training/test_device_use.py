"""A logged step's report on a simulated GPU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import without_folder
from support.rank_engine import rank_engine

from axonlaunch.comm import World
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.events import StepLogged
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.models.build import on_meta
from axonlaunch.models.facts.flops import ModelFlops
from axonlaunch.planning.throughput.step_work import step_work
from axonlaunch.training import worker
from axonlaunch.training.loggers.jsonl import JSONLLogger
from axonlaunch.training.measuring import device_use
from axonlaunch.training.measuring.device_use import DeviceUse, hardware_of, peak_flops

CUDA = torch.device("cuda", 0)


STEP: dict[str, Any] = {
    "step": 3,
    "loss": 1.5,
    "lr": 0.1,
    "grad_norm": None,
    "tokens": 64,
    "tokens_per_s": 640.0,
    "step_s": 0.1,
    "peak_memory_bytes": 2**30,
    "epoch": 0.5,
    "tokens_seen": 192,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a GPU that draws 650 W, whose allocator has emptied its cache once."""
    stats = {
        "reserved_bytes.all.peak": 3 * 2**30,
        "active_bytes.all.peak": 2 * 2**30,
        "num_alloc_retries": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_000)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(device_use.importlib.util, "find_spec", lambda name: object())
    return monkeypatch


@pytest.mark.usefixtures("gpu")
def test_step_has_gpu_metrics() -> None:
    use = DeviceUse(CUDA, flops_per_step=1e15, peak=1e15, devices=4)
    assert use.read(step_s=0.5) == {
        "reserved_bytes": 3 * 2**30,
        "active_bytes": 2 * 2**30,
        "alloc_retries": 1,
        "mfu": 0.5,
        "power_w": 650.0,
        "utilization": 0.97,
        "temperature_c": 61.0,
    }
    assert use.notes == ()


def test_missing_nvml_has_note(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(device_use.importlib.util, "find_spec", lambda name: None)
    use = DeviceUse(CUDA)
    assert "power_w" not in use.read(step_s=1.0)
    [note] = use.notes
    assert note == "not logged: power_w, utilization, temperature_c (pip install nvidia-ml-py)"


def test_refused_gpu_metric_is_queried_once(gpu: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> float:
        raise RuntimeError("Not Supported")  # a MIG slice reports this for its power

    gpu.setattr(torch.cuda, "power_draw", refuse)
    use = DeviceUse(CUDA)  # queries for the first time, so that a note appears at the start
    for _ in range(2):
        readings = use.read(step_s=1.0)
        assert "power_w" not in readings
        assert readings["temperature_c"] == 61.0
    assert use.notes == ("not logged: power_w (Not Supported)",)


def test_cpu_has_no_gpu_metrics() -> None:
    use = DeviceUse(torch.device("cpu"), flops_per_step=1.0, peak=1.0)
    assert use.read(step_s=1.0) == {}


# MFU.


@pytest.mark.usefixtures("gpu")
def test_device_peak_is_found_by_name() -> None:
    hardware = hardware_of(CUDA)
    assert hardware is not None
    assert hardware.name == "h100_80gb"
    assert hardware_of(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("overrides", "tflops"),
    [
        (["train.precision=bf16"], 4),
        (["train.precision=fp16"], 3),
        ([], 1),
        (["train.matmul_precision=high"], 2),
    ],
)
def test_mfu_uses_peak_of_run_precision(overrides: list[str], tflops: float) -> None:
    hardware = HardwareConfig(name="x", fp32_tflops=1, tf32_tflops=2, fp16_tflops=3, bf16_tflops=4)
    train = run_config(overrides).train
    assert peak_flops(hardware, train) == tflops * 1e12
    assert peak_flops(HardwareConfig(name="x"), train) is None
    assert peak_flops(None, train) is None


MOE = without_folder("qwen3_moe", num_experts=16, num_hidden_layers=4)
SYNTHETIC = ["data=synthetic_tokens", "data.sequence_length=32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["model=llama_debug", *SYNTHETIC, "strategy=tensor", "strategy.tensor.degree=2"],
        [*MOE, "strategy=fsdp"],
        [*MOE, "adapter=lora", "adapter.targets=all-linear"],
        [*without_folder("gemma2"), "strategy=fsdp", "train.freeze=[model.layers.*.mlp.*]"],
    ],
    ids=["tensor", "experts", "lora", "windows_and_frozen"],
)
def test_run_and_plan_count_equal_flops(overrides: list[str]) -> None:
    chosen = run_config([*overrides, "launch.nproc=2"])
    per_token = ModelFlops.of(on_meta(chosen, seed=0)).per_token(32)
    assert step_work(chosen, world_size=2).flops_per_token == per_token

    def counted(world: World) -> float | None:
        engine, loader = rank_engine(chosen, world)
        return worker._flops_per_step(chosen, engine, loader.dataset)

    assert World.mock(2).run(counted) == [per_token * 32 * chosen.train.global_batch_size] * 2


# Where it is shown.


def test_metrics_have_only_reported_gpu_values(tmp_path: Path) -> None:
    write = JSONLLogger(tmp_path / "metrics.jsonl", resumed_at=None)
    write(StepLogged(**STEP))
    write(StepLogged(**STEP, mfu=0.41, power_w=650.0))
    plain, full = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert plain == {**STEP, "data_wait_s": 0.0}
    assert full == {**plain, "mfu": 0.41, "power_w": 650.0}


GPU_STEP = {"mfu": 0.412, "reserved_bytes": 3 * 2**30, "active_bytes": 2**31, "alloc_retries": 2}
NVML = {"power_w": 650.0, "utilization": 0.97, "temperature_c": 61.0}


@pytest.mark.parametrize(
    ("read", "end"),
    [
        ({}, "1 GiB"),
        (GPU_STEP, "1 GiB of 3 GiB reserved, 2 retries  2 GiB active  4% waiting for data"),
        (
            {**GPU_STEP, **NVML, "alloc_retries": 0},
            "1 GiB of 3 GiB reserved  2 GiB active  650 W, 97% busy, 61 C, 4% waiting for data",
        ),
    ],
)
def test_console_step_has_gpu_metrics(read: dict[str, Any], end: str) -> None:
    stream = io.StringIO()
    show = RunConsole(stream=stream)
    show(StepLogged(**STEP, data_wait_s=0.004, **read))
    line = stream.getvalue().strip()
    assert line.endswith(f"640 tok/s  {'41.2% MFU  ' if read else ''}{end}")
