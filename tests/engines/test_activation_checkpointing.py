"""Activations that blocks keep or recompute, with checkpointing only and with the compiler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.comm import World
from axonlaunch.comm.autograd import all_reduce_from_group
from axonlaunch.config.options.model import LlamaConfig
from axonlaunch.engines.recomputation import activation_checkpointing
from axonlaunch.engines.recomputation.activation_checkpointing import (
    Mode,
    apply_activation_checkpointing,
)
from axonlaunch.models.build import build_model

LLAMA = LlamaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)


class Counted(TorchDispatchMode):
    def __init__(self, operation: object) -> None:
        super().__init__()
        self.operation, self.times = operation, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.times += func is self.operation
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it from its inputs
@pytest.mark.parametrize(
    "mode",
    [*(mode for mode in ("none", "full")), "selective"],
)
def test_blocks_that_recompute_are_compiled_in_one_piece(mode: Mode) -> None:
    torch._dynamo.reset()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    plain, model = build_model(LLAMA), build_model(LLAMA)
    apply_activation_checkpointing(model.layers, mode=mode)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    for each in (plain, model):
        each(tokens).sum().backward()
    assert counter.frame_count >= 1, "nothing was compiled"
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


class Summed(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.linear, self.group = nn.Linear(4, 4), world.default_group

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce_from_group(self.linear(x).relu(), self.group).relu()


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_repeats_no_collective(mode: Mode, times: int) -> None:
    def run(world: World) -> int:
        block = Summed(world)
        apply_activation_checkpointing([block], mode=mode)
        with Counted(torch.ops._c10d_functional.all_reduce.default) as counted:
            block(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return counted.times

    with warnings.catch_warnings():
        assert World.mock(2).run(run) == [times, times]


class _Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("block", "draws"),
    [
        (build_model(LLAMA).layers[0], False),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.Sequential(_Foreign()), True),
    ],
)
def test_generators_are_saved_only_where_a_block_may_draw(
    block: nn.Module, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preserved: list[bool] = []

    def checkpoint(forward: Any, *inputs: Any, preserve_rng_state: bool, **_: Any) -> Any:
        preserved.append(preserve_rng_state)
        return None

    monkeypatch.setattr(activation_checkpointing, "checkpoint", checkpoint)
    apply_activation_checkpointing([block], mode="full")
    block(torch.ones(1))
    assert preserved == [draws]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_repeats_dropout_of_adapters(mode: Mode) -> None:
    adapter = ["adapter=lora", "adapter.dropout=0.5", "strategy=single"]
    chosen = run_config(["model=llama_debug", "data=synthetic_tokens", *adapter])
    tokens = torch.arange(16)[None]

    def gradients(mode: Mode) -> dict[str, Tensor]:
        module = build_model(chosen, seed=0).train()
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
        apply_activation_checkpointing(module.layers, mode=mode)
        torch.manual_seed(0)
        module(tokens).square().mean().backward()
        trained = {name: each.grad for name, each in module.named_parameters()}
        return {name: each for name, each in trained.items() if each is not None}

    torch.testing.assert_close(gradients(mode), gradients("none"))


@pytest.mark.slow
def test_selective_recomputation_of_divided_experts_keeps_losses() -> None:
    """Experts are sharded separately, so fully_shard has hooks inside a recomputed block."""
    overrides = ["model=moe_debug", "data=synthetic_tokens", "data.sequence_length=8"]
    overrides += ["train.global_batch_size=2", "strategy=fsdp", "launch.nproc=2"]

    def losses(*more: str) -> list[float]:
        chosen = run_config([*overrides, *more])

        def run(world: World) -> list[float]:
            engine, loader = rank_engine(chosen, world)
            return [float(engine.train_step(loader.batch(step)).loss) for step in range(2)]

        return World.mock(2).run(run)[0]

    recomputed = losses("strategy.expert.degree=2", "train.activation_checkpointing=selective")
    assert recomputed == pytest.approx(losses(), rel=2e-5)
