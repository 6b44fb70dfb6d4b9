"""Running statistics in every strategy: updated on every rank, and equal on all ranks when used."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.parity_table import IMAGES
from support.rank_engine import rank_engine
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.engines.data_parallel.ddp import DDP
from axonlaunch.preflight import checks

LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, ["strategy=ddp"]),
    "zero1": (2, ["strategy=zero1"]),
    "zero2": (2, ["strategy=zero2"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "hsdp": (4, ["strategy=hsdp", "strategy.fsdp.replicate=2"]),
    "pipeline": (2, ["strategy=pipeline"]),
    "ddp x pipeline": (4, ["strategy=ddp", "strategy.pipeline.degree=2"]),
    "fsdp x pipeline": (4, ["strategy=fsdp", "strategy.pipeline.degree=2"]),
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_evaluate_and_save_the_same_statistics(name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    chosen = run_config(
        [
            *("model=custom", "model.target=support.normed:build", *IMAGES, *overrides),
            *(f"launch.nproc={ranks}", "launch.backend=mock", "train.global_batch_size=16"),
        ]
    )
    assert checks.find_issues(chosen, devices=0) == []

    def run(world: World) -> tuple[float, dict[str, Tensor]]:
        engine, loader = rank_engine(chosen, world)
        for step in range(3):
            engine.train_step(loader.batch(step))
        inputs = loader.dataset.samples([0, 1], split="eval").inputs
        eval_losses = engine.evaluate(next(iter(loader.eval_batches(1))))
        assert bool(torch.isfinite(eval_losses).all())
        outputs = engine.predict(inputs)
        state = engine.state_dict()["model"]
        buffers = {n: t.clone() for n, t in state.items() if "running" in n or "num_b" in n}
        return float(outputs.sum()), buffers

    reported = World.mock(ranks).run(run)
    statistics: dict[str, Tensor] = {}
    for outputs, buffers in reported:
        assert outputs == reported[0][0]
        for key, value in buffers.items():
            assert torch.equal(statistics.setdefault(key, value), value), key
    assert statistics["2.running_mean"].abs().sum() > 0
    forwards = Layout.of(chosen, world_size=ranks).micro_batches
    assert int(statistics["2.num_batches_tracked"]) == 3 * forwards


def test_a_forward_of_an_evaluation_broadcasts_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = run_config(
        [
            *("model=custom", "model.target=support.normed:build", *IMAGES, "strategy=ddp"),
            *("launch.nproc=2", "launch.backend=mock", "train.global_batch_size=16"),
        ]
    )
    sent: list[DDP] = []
    monkeypatch.setattr(DDP, "sync_buffers", sent.append)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.predict(loader.dataset.samples([0, 1], split="eval").inputs)

    World.mock(2).run(run)
    assert sent == []


class MovingMean(nn.Module):
    """Replaces its running mean by a new tensor in each forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean((0, 1))
        logits: Tensor = self.head(hidden - self.mean)
        return logits


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_replaced_buffer_tensors_are_the_same_on_all_ranks(strategy: str) -> None:
    ax.register_model("moving_mean", inputs="tokens")(MovingMean)
    chosen = run_config(
        [
            *("model=moving_mean", "data=synthetic_tokens", "data.sequence_length=8"),
            *(f"strategy={strategy}", "launch.nproc=2", "launch.backend=mock"),
            "train.global_batch_size=4",
        ]
    )

    def run(world: World) -> Tensor:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        mean: Tensor = engine.state_dict()["model"]["mean"]
        return mean.clone()

    first, second = World.mock(2).run(run)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0
