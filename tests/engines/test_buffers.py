"""Running statistics in every strategy: moved on every rank, and everywhere the same when used."""

from __future__ import annotations

import pytest
import torch
from configured import run_config
from parity_table import IMAGES
from rank_engine import rank_engine
from torch import Tensor

from axonlaunch.comm import World
from axonlaunch.config.layout import Layout
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_evaluate_and_save_the_same_statistics(name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    chosen = run_config(
        [
            *("model=custom", "model.target=normed:build", *IMAGES, *overrides),
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
