"""Runs on a node with accelerators; the devices are simulated, the processes are real."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.configured import estimate_config, run_config

from axonlaunch.comm import Backend, World, world
from axonlaunch.config import ConfigError
from axonlaunch.engines.data_parallel.registry import register_data_parallel
from axonlaunch.engines.data_parallel.replicas import Replicas
from axonlaunch.launch.external.join_ranks import devices_each
from axonlaunch.preflight import devices
from axonlaunch.system import gpus
from axonlaunch.training.process.start_notes import arithmetic_notes, device_notes

GIB = 2**30


def _have(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    devices = [gpus.Device("H100", 80 * GIB, f"uuid-{index}") for index in range(count)]
    monkeypatch.setattr(gpus, "devices", lambda: devices)


@pytest.mark.parametrize(
    ("devices", "nproc", "requested_device", "backend", "device"),
    [
        (8, 8, "auto", "nccl", "cuda"),
        (8, 2, "auto", "nccl", "cuda"),
        (8, 2, "cuda", "nccl", "cuda"),
        (8, 2, "cpu", "gloo", "cpu"),
        (1, 2, "auto", "gloo", "cpu"),
        (1, 2, "cuda", "mock", "cuda"),  # they share it
        (0, 2, "auto", "gloo", "cpu"),
    ],
)
def test_auto_backend_and_device_are_resolved_for_ranks(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    nproc: int,
    requested_device: str,
    backend: str,
    device: str,
) -> None:
    _have(monkeypatch, devices)
    launch = run_config([f"launch.nproc={nproc}", f"launch.device={requested_device}"]).launch
    assert (launch.backend, launch.device) == (backend, device)


@pytest.mark.parametrize(
    ("has_bf16", "device", "precision"),
    [(True, "cuda", "bf16"), (False, "cuda", "fp32"), (True, "cpu", "fp32")],
)
def test_automatic_precision_is_that_of_the_devices(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, device: str, precision: str
) -> None:
    monkeypatch.setattr(
        gpus, "devices", lambda: [gpus.Device("GPU", 80 * GIB, "uuid", has_bf16=has_bf16)]
    )
    chosen = ["train.precision=auto", "launch.nproc=1", f"launch.device={device}"]
    assert run_config(chosen).train.precision == precision


def test_only_gpus_since_ampere_have_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = [
        SimpleNamespace(name=name, total_memory=GIB, uuid=name, major=major, minor=0)
        for name, major in (("V100", 7), ("A100", 8), ("H100", 9))
    ]
    monkeypatch.setattr(gpus, "has_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties[number])
    assert [gpu.has_bf16 for gpu in gpus.devices_of_rank()] == [False, True, True]


@pytest.mark.parametrize(
    ("hip", "described", "has_fp8"),
    [
        (None, {"major": 8, "minor": 6}, False),
        (None, {"major": 8, "minor": 9}, True),
        (None, {"major": 10, "minor": 0}, True),
        ("7.0", {"gcnArchName": "gfx942:sramecc+:xnack-"}, False),
        ("7.0", {"gcnArchName": "gfx950:sramecc+:xnack-"}, True),
    ],
    ids=["A40", "L40S", "B200", "MI300", "MI350"],
)
def test_only_gpus_that_multiply_float8_e4m3fn_have_fp8(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, described: dict[str, Any], has_fp8: bool
) -> None:
    properties = SimpleNamespace(
        **{"name": "GPU", "total_memory": GIB, "uuid": "0", "major": 9, **described}
    )
    monkeypatch.setattr(gpus, "has_nccl", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    assert [gpu.has_fp8 for gpu in gpus.devices_of_rank()] == [has_fp8]


def test_products_in_8_bits_are_refused_on_gpus_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = [gpus.Device("A100", 80 * GIB, "uuid", has_fp8=False)]
    monkeypatch.setattr(gpus, "devices", lambda: devices)
    overrides = ["launch.nproc=1", "train.matmul_dtype=fp8_rowwise"]
    with pytest.raises(ConfigError, match=r"A100 has no products of 8-bit numbers, .*; use null"):
        run_config(overrides)
    run_config([*overrides, "launch.device=cpu"])


@pytest.mark.parametrize(
    ("devices", "overrides", "message"),
    [
        (0, ["launch.device=cuda"], "launch.device=cuda: this node has no accelerator"),
        (0, ["launch.device=cuda", "launch.backend=gloo"], "launch.device=cuda: this node has no"),
        (
            8,
            ["launch.device=cpu", "launch.backend=nccl"],
            "launch.device=cpu: NCCL needs accelerators",
        ),
        (
            1,
            ["launch.device=cuda", "launch.backend=gloo", "strategy=fsdp"],
            "launch.backend=gloo: gloo can reduce and broadcast GPU tensors, .* use mock",
        ),
    ],
)
def test_unusable_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int, overrides: list[str], message: str
) -> None:
    _have(monkeypatch, devices)
    with pytest.raises(ConfigError, match=message):
        run_config(["launch.nproc=2", *overrides])


def test_a_variant_that_replicates_everything_may_use_gloo_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _have(monkeypatch, 1)
    register_data_parallel("averaged", averages="parameters")(Replicas)
    launch = ["launch.nproc=2", "launch.device=cuda", "launch.backend=gloo"]
    assert run_config([*launch, "strategy.data_parallel=averaged"]).launch.backend == "gloo"


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        (["launch.nproc=2"], 80),
        (["launch.nproc=4", "launch.device=cuda"], 20),  # threads share the first
        (["launch.nproc=4", "launch.device=cuda", "launch.backend=gloo", "strategy=ddp"], 40),
    ],
)
def test_ranks_that_share_a_device_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gib: int
) -> None:
    _have(monkeypatch, 2)
    assert devices.memory_of_a_rank(run_config(overrides))[0] == gib * GIB


def test_an_estimate_leaves_the_backend_to_the_node_that_runs() -> None:
    assert estimate_config(["launch.nproc=2", "hardware=h100_80gb"]).launch.backend == "auto"


def test_more_ranks_than_devices_are_refused_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, 1)
    with pytest.raises(ConfigError, match="2 ranks need an accelerator each; this node has 1; use"):
        run_config(["launch.nproc=2", "launch.backend=nccl"])


def test_failed_driver_is_error_instead_of_cpu_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> list[gpus.Device]:
        raise RuntimeError("CUDA unknown error\nmore")

    monkeypatch.setattr(gpus, "devices", fail)
    with pytest.raises(ConfigError, match="CUDA fails here: CUDA unknown error; repair it"):
        run_config(["launch.nproc=2"])
    assert run_config(["launch.nproc=2", "launch.device=cpu"]).launch.backend == "gloo"


@pytest.mark.parametrize(
    ("visible", "nproc", "each"),
    [
        ([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], 2, 2),
        ([["a"], ["b"], ["c"], ["d"]], 2, 2),  # --gpus-per-task=1
        ([["a"], ["a"], ["b"], ["b"]], 2, 1),  # two ranks share one
        ([["a", "b"], ["a", "b"], [], []], 2, 0),  # a node without devices
        ([["a"]], 1, 1),
    ],
)
def test_ranks_of_other_launchers_use_visible_devices(
    visible: list[list[str]], nproc: int, each: int
) -> None:
    assert devices_each(visible, nproc) == each


def test_cpu_run_on_node_with_devices_has_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonlaunch.system.gpus.device_count", lambda: 2)
    [note] = device_notes(_world("cpu", "gloo"))
    assert "the ranks compute on the CPU, although rank 0 sees 2 devices" in note
    assert "launch.device=cuda launch.nproc=2" in note
    assert [*device_notes(_world("cpu", "mock"))] == [note]
    assert not [*device_notes(_world("cuda", "nccl"))]


def test_shared_device_memory_measurement_has_note() -> None:
    [threads], [processes] = (device_notes(_world("cuda", name)) for name in ("mock", "gloo"))
    assert "ranks share cuda, which is slow and meant for debugging" in threads
    assert threads.endswith("memory figures include all ranks")
    assert processes.endswith("memory figures are only its own")


@pytest.mark.parametrize(
    ("overrides", "device", "capability", "is_noted"),
    [
        ([], "cuda", (9, 0), True),
        ([], "cuda", (7, 5), False),  # without TF32
        ([], "cpu", (9, 0), False),
        (["train.matmul_precision=high"], "cuda", (8, 0), False),
        (["train.precision=bf16"], "cuda", (8, 0), False),
    ],
)
def test_fp32_without_tf32_has_note(
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    device: str,
    capability: tuple[int, int],
    is_noted: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    train = run_config(overrides).train
    notes = [*arithmetic_notes(train, torch.device(device))]
    assert ["train.matmul_precision=high" in note for note in notes] == [True] * is_noted


def test_gloo_ranks_are_distributed_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    devices_of_ranks = [world._device(Backend.GLOO, rank, requested="cuda") for rank in range(3)]
    assert devices_of_ranks == [torch.device("cuda", index) for index in (0, 1, 0)]
    assert done == [0, "init", 1, "init", 0, "init"]
    with pytest.raises(ValueError, match="backend=nccl, device=cpu: NCCL works only on GPUs"):
        world._device(Backend.NCCL, 0, requested="cpu")


def _world(device: str, backend: str) -> World:
    about = {"device": torch.device(device), "backend": Backend(backend), "world_size": 2}
    return cast("World", SimpleNamespace(**about))


@pytest.mark.parametrize(("device", "missing"), [("cpu", "g++"), ("cuda", "gcc")])
def test_compiled_blocks_need_a_compiler_on_the_node(
    device: str, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _have(monkeypatch, 2)
    variable = "CXX" if device == "cpu" else "CC"
    monkeypatch.delenv(variable, raising=False)
    config = run_config(["train.compile=true", f"launch.device={device}", "launch.nproc=2"])
    with_compiler = [*devices.device_problems(config, 2)]
    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = devices.device_problems(config, 2)
    assert with_compiler == []
    assert str(problem) == (
        f"train.compile=true: needs {missing}, which is not in PATH; install it, set {variable}, "
        "or use false"
    )
    monkeypatch.setenv(variable, sys.executable)
    assert [*devices.device_problems(config, 2)] == []
