"""``strategy=auto`` and the measurements of this node that it plans with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from support.command import Served
from support.served import Server, reached

from axonlaunch import config
from axonlaunch.config import Composed, ConfigError
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.diagnostics.doctor import measured_hardware
from axonlaunch.planning import auto_strategy
from axonlaunch.planning.search import found_hardware
from axonlaunch.system.storage import cache

H100 = "NVIDIA H100 80GB HBM3"
MLP = ["model=mlp", "data=synthetic_images", "train.global_batch_size=4"]


@pytest.fixture
def context(server: Server) -> Iterator[ForkServerContext]:
    with reached(server) as reached_server:
        yield reached_server


def measured(ranks: int) -> dict[str, Any]:
    """Store figures as if they had been measured."""
    figures: dict[str, Any] = {
        "fp32_tflops": 0.08,
        "attention_efficiency": 1.0,
        "kernel_us": 8.0,
        "kernel_bytes": [1e6, 1e8],
        "kernel_latency_us": [20.0, 30000.0],
        "link_latency_us": 500.0,
        "link_gb_s": 1.0,
        "allgather_bw_gb_s": 0.5,
        "memory_gib": 4.0,
        "matrix_efficiency": 1.0,
        "multiprocessors": 1,
        "devices_per_node": ranks,
        "link": "loopback",
        "link_efficiency": 1.0,
    }
    measured_hardware._keep(ranks, figures)
    return figures


def load(overrides: list[str], context: ForkServerContext | None = None) -> config.RunConfig:
    def compose(overrides: Any) -> Composed:
        return config.compose(overrides)

    def server() -> ForkServerContext:
        assert context is not None, "no server is needed"
        return context

    _, run = auto_strategy.load_auto_strategy(
        overrides, compose=compose, server=server, config_dirs=[]
    )
    return run


@pytest.mark.slow
def test_auto_strategy_trains_in_planned_layout(tmp_path: Path, server: Server) -> None:
    measured(2)
    overrides = [
        *MLP,
        "strategy=auto",
        "strategy.tensor.degree=2",
        "launch.nproc=2",
        "train.steps=2",
    ]
    overrides += ["train.micro_batch_size=4", "train.activation_checkpointing=none"]
    ran = Served(tmp_path, server)("train", *overrides, "launch.backend=mock", "run_dir=run")
    assert "\ntensor 2 on cpu: " in ran.stdout
    assert ran.stderr.startswith(
        "planning the layout of 2 ranks\nplanned tensor 2, micro-batch 4: "
    )
    frozen = config.read_frozen(tmp_path / "run")
    assert frozen.strategy.tensor.degree == 2
    assert frozen.hardware is None
    assert not frozen.strategy.auto


def test_auto_strategy_is_skipped_with_explicit_layout() -> None:
    assert load([*MLP, "strategy=fsdp"]) == config.load([*MLP, "strategy=fsdp"])


@pytest.mark.parametrize(
    ("devices", "option"),
    [
        ([], "cpu"),
        ([H100, H100], "h100_80gb"),
        (["NVIDIA A100-SXM4-40GB"], "a100_40gb"),
        (["NVIDIA H200"], "h200"),
    ],
)
def test_hardware_is_detected_by_device_name(devices: list[str], option: str) -> None:
    assert found_hardware.hardware_option(devices, config.load([]), []) == option


@pytest.mark.parametrize(
    ("device", "overrides", "reported"),
    [
        (
            "NVIDIA GB300",
            [],
            "needs figures of the devices, and NVIDIA GB300 is not in the catalog; use",
        ),
        (H100, ["launch=slurm"], "and the job runs on other nodes; use a100_40gb, "),
        (H100, ["launch=kubernetes"], "and the job runs on other nodes"),
    ],
)
def test_unknown_hardware_must_be_named(device: str, overrides: list[str], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        found_hardware.hardware_option([device], config.load(overrides), [])


@pytest.mark.parametrize(
    ("devices", "word", "found"),
    [
        ([H100, H100], "hardware=h100_80gb", f"hardware=h100_80gb: found 2 x {H100}"),
        ([], "hardware=cpu", "hardware=cpu: found "),
    ],
)
def test_hardware_auto_is_replaced_by_found_devices(
    devices: list[str],
    word: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    context: ForkServerContext,
) -> None:
    monkeypatch.setattr(found_hardware, "device_names", lambda context, config: devices)
    run = load([*MLP, "hardware=auto", "hardware.price_per_hour=2"], context)
    assert run == config.load([*MLP, word, "hardware.price_per_hour=2"])
    assert capsys.readouterr().err.startswith(found)


def test_hardware_auto_refuses_unknown_and_different_devices() -> None:
    chosen = config.load(["hardware=auto"])
    for devices, reason in (
        (["NVIDIA GB300"], "NVIDIA GB300 is not in the catalog"),
        ([H100, "NVIDIA H200"], f"those of this node differ: {H100}, NVIDIA H200"),
    ):
        with pytest.raises(ConfigError) as raised:
            found_hardware.hardware_option(devices, chosen, [], setting="hardware=auto")
        assert f"hardware=auto needs figures of the devices, and {reason}; use a100" in str(
            raised.value
        )


def test_single_node_measurement_is_not_used_for_several(context: ForkServerContext) -> None:
    overrides = [*MLP, "strategy=auto", "launch.nnodes=2", "launch.nproc=1", "launch.master_addr=a"]
    with pytest.raises(ConfigError, match="hardware=cpu: is measured on one node"):
        load(overrides, context)


def test_this_node_is_measured_once(
    context: ForkServerContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hardware = HardwareConfig(name="cpu", link_gb_s=5.0)
    completed = measured_hardware.measure_this_node(context, hardware, ranks=2)
    assert completed.link_gb_s == 5.0
    for name in ("fp32_tflops", "bf16_tflops", "kernel_us", "link_latency_us", "allgather_bw_gb_s"):
        assert getattr(completed, name) > 0
    assert completed.kernel_latency_us[-1] > completed.kernel_latency_us[2] > 0
    assert len(completed.kernel_latency_us) == len(completed.kernel_bytes)
    [cached] = cache.cache_folder().glob("hardware/cpu_2_*.json")
    cached.write_text(json.dumps(json.loads(cached.read_text()) | {"kernel_us": 123.0}))
    assert measured_hardware.measure_this_node(context, hardware, ranks=2).kernel_us == 123.0


def test_unstorable_measurements_are_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    measured(2)
    assert measured_hardware._read_kept(2) is None
