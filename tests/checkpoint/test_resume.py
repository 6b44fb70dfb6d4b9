"""A resumed run equals an uninterrupted one, including fp16's scale and the optimizer's states."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.configured import run_config
from torch import Tensor

from axonlaunch import checkpoint, engines
from axonlaunch.checkpoint.loading import reader
from axonlaunch.comm import World
from axonlaunch.config import with_values
from axonlaunch.engines.precision.policy import LossScale
from axonlaunch.training import worker

OVERRIDES = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"),
    *("train.eval_batches=0", "train.precision=fp16", "checkpoint.keep_last=9", "launch.nproc=2"),
    *("launch.backend=mock", "scheduler=constant", "scheduler.warmup_steps=0"),
]


@pytest.fixture(autouse=True)
def _grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale begins at 8 and doubles after every third good step, not every 2000th."""
    monkeypatch.setattr(
        engines.build, "LossScale", partial(LossScale, value=8.0, growth_interval=3)
    )


def train(folder: Path, strategy: str, *, steps: int) -> dict[str, Tensor]:
    """Train from the folder's last step to a step; return everything that it then saves."""
    folder.mkdir(exist_ok=True)
    chosen = run_config([*OVERRIDES, f"strategy={strategy}", f"checkpoint.every={steps}"])
    there = {"run_dir": str(folder), "train.steps": steps}
    config = with_values(chosen, there)
    World.mock(2).run(lambda world: worker.run(config, world))
    newest = checkpoint.latest(folder)
    assert newest is not None
    assert newest.step == steps
    contents = reader.contents(newest)
    return dict(zip(contents, reader.tensors(newest, list(contents), contents), strict=True))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("strategy", ["zero1", "ddp", "fsdp"])
def test_resume_restores_fp16_scale_and_optimizer_states(strategy: str, tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "whole", strategy, steps=8)
    stopped = train(tmp_path / "parts", strategy, steps=4)
    # 4 steps: doubled after the third, and one good step towards the next; 8: doubled twice.
    for saved, scale, good_steps in ((stopped, 16.0, 1), (undisturbed, 32.0, 2)):
        assert float(saved["counters.loss_scale"]) == scale
        assert int(saved["counters.good_steps"]) == good_steps
    resumed = train(tmp_path / "parts", strategy, steps=8)
    assert resumed.keys() == undisturbed.keys()
    for name, tensor in undisturbed.items():
        assert torch.equal(resumed[name], tensor), name
