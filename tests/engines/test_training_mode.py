"""Evaluation and prediction restore the training mode of every module."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.parity_table import IMAGES
from support.rank_engine import rank_engine
from torch import nn

from axonlaunch.comm import World

LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "pipeline": (2, ["strategy=pipeline"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_restores_training_mode_of_each_module(name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    custom = [
        "model=custom",
        "model.target=support.normed:build",
        *IMAGES,
        "train.global_batch_size=8",
    ]
    chosen = run_config([*custom, *overrides, f"launch.nproc={ranks}", "launch.backend=mock"])

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        modules = [part for stage in engine.modules for part in stage.modules()]
        assert all(part.training for part in modules)
        seen_modes = []
        for part in modules:
            if isinstance(part, nn.BatchNorm1d):
                part.eval()  # frozen statistics, which training leaves frozen
                part.register_forward_hook(lambda module, *_: seen_modes.append(module.training))
            if isinstance(part, nn.ReLU):
                part.register_forward_hook(lambda module, *_: seen_modes.append(module.training))
        modes = [part.training for part in modules]
        batch = next(iter(loader.eval_batches(1)))
        for look in (lambda: engine.evaluate(batch), lambda: engine.predict(batch.inputs)):
            look()
            assert not any(seen_modes)
            assert [part.training for part in modules] == modes
            engine.train_step(loader.batch(0))
            assert [part.training for part in modules] == modes
            seen_modes.clear()

    World.mock(ranks).run(run)


def test_model_in_eval_mode_is_trained_in_training_mode() -> None:
    """Pretrained models come in evaluation mode, in which dropout is off."""
    from axonlaunch import register_model

    @register_model("came_in_eval", inputs="tokens")
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(256, 4), nn.Dropout(0.5), nn.Linear(4, 256)).eval()

    overrides = ["model=came_in_eval", "data=synthetic_tokens", "data.sequence_length=8"]
    chosen = run_config([*overrides, "launch.nproc=1", "strategy=single"])

    def run(world: World) -> bool:
        engine, _ = rank_engine(chosen, world)
        return engine.modules[0][1].training  # type: ignore[index]

    assert World.mock(1).run(run) == [True]
    assert torch.is_grad_enabled()
