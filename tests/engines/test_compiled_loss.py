"""Losses that are compiled with the blocks, and their unchanged values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine

from axonlaunch.comm import World
from axonlaunch.config import ConfigError, with_values
from axonlaunch.config.options.data import IGNORE_INDEX
from axonlaunch.config.schema import TrainConfig
from axonlaunch.engines.tensor.outputs.losses import Losses, losses_of
from axonlaunch.models.architectures.gpt import SPEC
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec


def chosen(spec: ModelSpec = SPEC, **options: Any) -> Losses:
    classes = options.pop("classes", None)
    train = TrainConfig(**{"compile": True, **options})
    return World.mock(1).run(
        lambda world: losses_of(spec, train, group=world.default_group, classes=classes)
    )[0]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    compiling = torch.compile

    def compile_eagerly(function: Any, *, mode: str) -> Any:
        calls.append((function, mode))
        return compiling(function, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    return calls


def test_compiled_cross_entropy_keeps_values(
    compiled: list[Any],
) -> None:
    loss = chosen().loss
    assert compiled == [(cross_entropy_sum, "default")]
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.tensor([[0, 4, IGNORE_INDEX], [2, 2, 1]])
    rows = logits.detach().double().flatten(0, 1).requires_grad_()
    expected = torch.nn.functional.cross_entropy(rows, targets.flatten(), reduction="sum")
    expected.backward()
    computed = loss(logits, targets)
    computed.backward()
    assert computed.dtype is torch.float32
    assert computed.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad is not None
    assert rows.grad is not None
    torch.testing.assert_close(
        logits.grad.double(), rows.grad.view_as(logits), rtol=1e-2, atol=1e-3
    )


def test_compiled_cross_entropy_keeps_label_smoothing_and_z_loss(compiled: list[Any]) -> None:
    loss = chosen(label_smoothing=0.1, z_loss=0.02).loss
    assert len(compiled) == 2
    logits, targets = torch.randn(4, 5), torch.tensor([0, 4, IGNORE_INDEX, 2])
    expected = cross_entropy_sum(logits, targets, label_smoothing=0.1, z_loss=0.02)
    assert loss(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "options", [{"compile": False}, {"loss_chunk": 4}, {"classes": 8}], ids=str
)
def test_a_loss_that_is_divided_or_in_chunks_is_not_compiled(
    compiled: list[Any], options: dict[str, Any]
) -> None:
    chosen(**options)
    assert compiled == []


def test_custom_loss_is_not_compiled(compiled: list[Any]) -> None:
    spec = ModelSpec(build=SPEC.build, loss=lambda outputs, targets: outputs.sum())
    assert chosen(spec).loss is spec.loss
    assert compiled == []


def test_blocks_and_loss_are_compiled_in_configured_mode(compiled: list[Any]) -> None:
    mode = "max-autotune-no-cudagraphs"
    overrides = ["train.compile=true", f"train.compile_mode={mode}", "model.num_hidden_layers=2"]
    # Threads of the mock world refuse the compiler; a single rank is enough to see the request.
    config = with_values(run_config([*overrides, "launch.nproc=1"]), {"launch.backend": "mock"})
    World.mock(1).run(lambda world: rank_engine(config, world))
    assert [used for _, used in compiled] == [mode] * 3


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compile_mode_with_cuda_graphs_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"compile_mode={mode}: CUDA graphs .*; use default or"):
        run_config(["train.compile=true", f"train.compile_mode={mode}", "launch.nproc=1"])


def test_compile_mode_without_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile_mode=max-.*: nothing is compiled; add train"):
        run_config(["train.compile_mode=max-autotune-no-cudagraphs", "launch.nproc=1"])
