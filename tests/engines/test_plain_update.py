"""Updates in every layout equal plain torch: learning rate, weight decay and averaging."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch import data
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.engines.data_parallel.ddp import DDP
from axonlaunch.models.build import build_model
from axonlaunch.models.tensors.dtensor_regions import full_tensor

TOKENS = ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"]
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, ["strategy=ddp"]),
    "ddp, no_sync": (2, ["strategy=ddp", "strategy.ddp.sync=no_sync"]),
    "zero1": (2, ["strategy=zero1"]),
    "fsdp": (2, ["strategy=fsdp"]),
}


class Frozen(nn.Module):
    """Freezes its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.embed.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def train(name: str, *overrides: str, steps: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Return rank 0's full parameters after each step, and the reported learning rates."""
    ranks, layout = LAYOUTS[name]
    arguments = [*TOKENS, *layout, *overrides, f"launch.nproc={ranks}", "launch.backend=mock"]
    chosen = run_config([*arguments, f"train.steps={steps}", "train.grad_clip=null"])

    def run(world: ax.World) -> tuple[list[dict[str, Tensor]], list[float]]:
        engine, loader = rank_engine(chosen, world)
        # Reads the optimizer's states, as a save before the first step does.
        states = engine.state_dict()["optimizer"]
        assert {name.partition(".")[0] for name in states} == {"head"}
        after, rates = [], []
        for step in range(steps):
            rates.append(engine.learning_rate())
            engine.train_step(loader.batch(step))
            after.append({n: full_tensor(p.detach()).clone() for n, p in engine.named_parameters()})
        return after, rates

    return ax.World.mock(ranks).run(run)[0]


def in_plain_torch(
    model: nn.Module, optimizer: Any, *, rates: list[float]
) -> list[dict[str, Tensor]]:
    """Return the parameters after each step of a plain torch loop on the same samples."""
    chosen = run_config([*TOKENS, "strategy=single"])
    loader = Loader(data.build_dataset(chosen.data), seed=chosen.seed, global_batch_size=4)
    after = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = loader.batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
        after.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return after


def assert_close(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for step, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.keys() == b.keys()
        for name, tensor in b.items():
            torch.testing.assert_close(a[name], tensor, msg=lambda m, s=step: f"step {s}: {m}")


@pytest.mark.parametrize("name", ["single", "zero1", "fsdp"])
def test_learning_rate_of_each_step_follows_schedule(name: str) -> None:
    """Two steps of warm-up, then linearly down to a tenth at the last of six."""
    ax.register_model("frozen")(Frozen)
    schedule = ["scheduler=linear", "scheduler.warmup_steps=2", "scheduler.final_lr_ratio=0.1"]
    sgd = ["optimizer=sgd", "optimizer.lr=0.8", "optimizer.momentum=0.5"]
    got, said = train(name, "model=frozen", *schedule, *sgd, steps=6)
    rates = [0.4, 0.8, 0.8, 0.56, 0.32, 0.08]
    assert said == pytest.approx(rates)
    model = build_model(run_config(["model=frozen", *TOKENS, "strategy=single"]).model, seed=0)
    optimizer = torch.optim.SGD(model.head.parameters(), momentum=0.5)  # type: ignore[union-attr]
    assert_close(got, in_plain_torch(model, optimizer, rates=rates))


@pytest.mark.parametrize("name", LAYOUTS)
def test_frozen_parameters_are_not_decayed(name: str) -> None:
    ax.register_model("frozen")(Frozen)
    constant = ["scheduler=constant", "scheduler.warmup_steps=0"]
    decay = ["optimizer.lr=0.1", "optimizer.weight_decay=0.5", "optimizer.eps=1e-4"]
    got, _ = train(name, "model=frozen", *constant, *decay, steps=3)
    model = build_model(run_config(["model=frozen", *TOKENS, "strategy=single"]).model, seed=0)
    start = copy.deepcopy(model)
    groups = [
        {"params": [model.get_parameter("head.weight")], "weight_decay": 0.5},
        {"params": [model.get_parameter("head.bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-4)
    assert_close(got, in_plain_torch(model, optimizer, rates=[0.1] * 3))
    for after in got:
        assert torch.equal(after["embed.weight"], start.get_parameter("embed.weight"))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["own type", "float32"])
@pytest.mark.parametrize("sync", ["overlapped", "synchronous", "no_sync"])
def test_all_gradient_buckets_are_averaged_including_last(
    sync: str, reduce_dtype: torch.dtype | None
) -> None:
    """Includes replicas that torch reduces. Setting a reduce dtype keeps overlapped buckets in
    axonlaunch's code.
    """

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    alone = make()
    alone(inputs).square().mean().backward()

    def run(world: ax.World) -> None:
        model = make()
        replicas = DDP(model, sync=sync, bucket_size_mb=0.0003, reduce_dtype=reduce_dtype)
        assert len(replicas.synchronizer.buckets) > 2
        for _ in range(2):  # buckets of one step must not affect the next
            model.zero_grad()
            replicas(inputs[2 * world.rank : 2 * world.rank + 2]).square().mean().backward()
            if sync == "no_sync":
                replicas.sync_gradients()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, msg=name)

    ax.World.mock(2).run(run)
