"""Settings of torch for a run's process."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.schema import TrainConfig
from axonlaunch.events import Event, Monitor, StepLogged
from axonlaunch.training import worker
from axonlaunch.training.process.arithmetic import attention_kernels, configure_arithmetic


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.benchmark
    yield
    configure_arithmetic(run_config([]).train)
    torch.backends.cudnn.benchmark = cudnn
    torch.set_float32_matmul_precision(precision)


def test_deterministic_run_refuses_nondeterministic_operations() -> None:
    torch.backends.cudnn.benchmark = True
    configure_arithmetic(run_config(["train.deterministic=true"]).train)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_default_run_keeps_torch_settings() -> None:
    configure_arithmetic(run_config(["train.deterministic=true"]).train)
    configure_arithmetic(run_config([]).train)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.get_float32_matmul_precision() == "highest"


def test_matrix_products_in_fp32_are_as_precise_as_the_run_says() -> None:
    configure_arithmetic(run_config(["train.matmul_precision=high"]).train)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32


def test_training_steps_use_configured_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    tiny += ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=2"]
    tiny += ["strategy=single", "launch.nproc=1", "train.steps=1"]
    chosen = run_config([*tiny, "train.matmul_precision=high", f"run_dir={tmp_path}"])
    monkeypatch.setattr(worker, "attention_kernels", lambda config, device: sdpa_kernel(MATH))
    used = []

    def report(event: Event) -> None:
        if isinstance(event, StepLogged):
            kernels = _cur_sdpa_kernel_backends()
            used.append((torch.get_float32_matmul_precision(), kernels, gc.isenabled()))

    World.mock(1).run(lambda world: worker.run(chosen, world, monitor=Monitor(report=report)))
    # automatic collection is off, because ranks collect together
    assert used == [("high", [MATH], False)]


# Attention.

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_cudnn_s_attention_comes_first_on_hopper_and_blackwell(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = _cur_sdpa_kernel_backends(with_priority=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with attention_kernels(TrainConfig(), torch.device("cuda", 0)):
        assert _cur_sdpa_kernel_backends(with_priority=True) == [CUDNN, FLASH, EFFICIENT, MATH]
    assert _cur_sdpa_kernel_backends(with_priority=True) == kernels


@pytest.mark.parametrize(
    ("device", "capability"), [("cuda", (8, 0)), ("cuda", (12, 0)), ("cpu", 0)]
)
def test_attention_kernel_order_defaults_to_torch(
    device: str, capability: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = _cur_sdpa_kernel_backends(with_priority=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with attention_kernels(TrainConfig(), torch.device(device, 0)):
        assert _cur_sdpa_kernel_backends(with_priority=True) == kernels


@pytest.mark.parametrize(
    ("kernel", "backend"), [("cudnn", CUDNN), ("flash", FLASH), ("efficient", EFFICIENT)]
)
def test_configured_attention_kernel_is_exclusive(kernel: Any, backend: SDPBackend) -> None:
    config = TrainConfig(attention_kernel=kernel)
    with attention_kernels(config, torch.device("cuda", 0)):
        assert _cur_sdpa_kernel_backends() == [backend]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.attention_kernel=flash"],
            "train.attention_kernel=flash: supports only bf16 and fp16; use efficient, or "
            "train.precision=bf16",
        ),
        (
            ["train.attention_kernel=efficient", "strategy.context.degree=2"],
            "train.attention_kernel=efficient: ring attention uses its own kernel; use auto",
        ),
        (
            ["train.attention_kernel=flash", "data=documents", "data.packing=best_fit"],
            "train.attention_kernel=flash: supports no mask, which packed documents need; use "
            "cudnn or efficient",
        ),
        (
            ["train.attention_kernel=cudnn", "train.precision=bf16"],
            "train.attention_kernel=cudnn: the ranks compute on the CPU, which has one kernel; "
            "use auto",
        ),
    ],
)
def test_unusable_attention_kernel_is_refused(overrides: list[str], message: str) -> None:
    if "packing" in overrides[-1]:
        overrides = [*overrides, "train.precision=bf16", f"data.files=[{__file__}]"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_config([*overrides, "launch.nproc=2"])
