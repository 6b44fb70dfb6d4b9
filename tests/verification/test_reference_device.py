"""The reference runs on the same device as the layout, and reports unused values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.parity_table import MODELS
from support.pretend_gpu import PretendGpu
from torch import Tensor

from axonlaunch.config import RunConfig, with_values
from axonlaunch.verification.proofs import runner
from axonlaunch.verification.references import plain_model
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.reference import PlainRun
from axonlaunch.verification.references.reference_values import Reference


def tensors_of(result: Reference) -> list[Tensor]:
    held = [result.start, result.parameters, result.buffers, result.states, result.end]
    held += [step.gradients for step in result.steps]
    assert result.prediction is not None
    return [result.prediction, *(tensor for group in held for tensor in group.values())]


def config_of(precision: str) -> RunConfig:
    chosen = ["strategy=ddp", "launch.nproc=2", f"train.precision={precision}"]
    return run_config(
        [*MODELS["llama"], "model.num_hidden_layers=1", "train.global_batch_size=2", *chosen]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_where_ranks_are_on_gpus_one_process_is_too(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    plan = ComparisonPlan(steps=1, beyond=True)
    config = config_of(precision)
    expected = PlainRun(config, plan).run()
    on_gpus = replace(config, launch=replace(config.launch, backend="nccl", device="cuda"))

    devices: list[str] = []
    cast, scale = torch.autocast, torch.amp.GradScaler

    def autocast(device: str, **options: Any) -> Any:
        devices.append(device)
        return cast("cpu", **options)

    def scaler(device: str, **options: Any) -> Any:
        devices.append(device)
        return scale("cpu", **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    with PretendGpu() as gpu:
        run = PlainRun(on_gpus, plan)
        assert all(map(gpu.holds, run.model.parameters()))
        result = run.run()
    assert {"linear", "embedding"} <= gpu.computed
    assert set(devices) == {"cuda"}
    assert not any(map(gpu.holds, tensors_of(result)))
    torch.testing.assert_close(tensors_of(result), tensors_of(expected), rtol=0, atol=0)
    assert [step.loss for step in result.steps] == [step.loss for step in expected.steps]


def test_numbers_drawn_on_a_device_are_noticed_as_those_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, generator_class = torch.Generator(), torch.Generator
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator_class())
    device = torch.device("cuda", 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        gpu.manual_seed(5)
        assert not plain_model.has_drawn_numbers(device, seed=5)
        torch.rand(1, generator=gpu)
        assert plain_model.has_drawn_numbers(device, seed=5)
        assert not plain_model.has_drawn_numbers(torch.device("cpu"), seed=5)


@pytest.mark.parametrize(
    ("devices", "device", "expected"),
    [
        (0, "cpu", []),
        (2, "cuda", []),
        (
            2,
            "cpu",
            [
                "both sides ran on the CPU, and this node has 2 GPUs: launch.backend=nccl gives "
                "each rank its own, launch.device=cuda lets ranks share one"
            ],
        ),
        (
            1,
            "cpu",
            [
                "both sides ran on the CPU, and this node has a GPU: launch.device=cuda lets ranks "
                "share one"
            ],
        ),
    ],
)
def test_gpus_that_were_not_used_are_mentioned(
    devices: int, device: str, expected: list[str]
) -> None:
    config = with_values(config_of("fp32"), {"launch.device": device})
    assert runner._notes(config, devices) == expected
