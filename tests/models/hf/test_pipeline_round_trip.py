"""A model of transformers trained in stages: saved, resumed elsewhere, exported, loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import save
from support.hf_loops import SETTINGS
from support.rank_engine import rank_engine

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World

PIPELINE = ["strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"]
HYBRID = [
    *("strategy=tensor", "strategy.tensor.degree=2", "strategy.pipeline.degree=2"),
    "launch.nproc=4",
]
FSDP = ["strategy=fsdp", "launch.nproc=2"]
SAMPLE = torch.arange(32)[None] * 7


def on_ranks(overrides: list[str], work: Any) -> Any:
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"
    return World.mock(chosen.launch.nproc).run(
        lambda world: work(*rank_engine(chosen, world), world)
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [("gpt2", PIPELINE, FSDP), ("gemma2", FSDP, HYBRID)],
)
def test_a_run_resumes_on_another_layout_and_transformers_loads_its_export(
    kind: str, writer: list[str], reader: list[str], tmp_path: Path
) -> None:
    import transformers

    save(kind, tmp_path / "model", num_hidden_layers=4)
    overrides = [f"model.path={tmp_path / 'model'}"]

    def train(engine: Any, loader: Any, world: World) -> list[float]:
        chosen = run_config([*SETTINGS, *overrides, *writer])
        weights.load_initial_weights(engine, chosen.model, world=world)
        for step in range(2):
            engine.train_step(loader.batch(step))
        saver = Saver(tmp_path / "run", world=world, retention=Retention(newest=2))
        saver.save(engine.state_dict(), step=2, samples=8)
        return [float(engine.train_step(loader.batch(step)).loss) for step in (2, 3)]

    def resume(engine: Any, loader: Any, world: World) -> tuple[list[float], torch.Tensor]:
        newest = checkpoint.latest(tmp_path / "run")
        assert newest is not None
        engine.load_state_dict(checkpoint.load_checkpoint(newest, engine.state_dict(), world=world))
        losses = [float(engine.train_step(loader.batch(step)).loss) for step in (2, 3)]
        saver = Saver(tmp_path / "run", world=world, retention=Retention(newest=2))
        saver.save(engine.state_dict(), step=4, samples=16)
        return losses, engine.predict(SAMPLE)

    uninterrupted = on_ranks([*overrides, *writer], train)
    resumed, logits = on_ranks([*overrides, *reader], resume)
    assert resumed == pytest.approx(uninterrupted, rel=1e-5)

    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    chosen = run_config([*SETTINGS, *overrides, *reader])
    weights.export_weights(newest, chosen, tmp_path / "out")
    reloaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    with torch.no_grad():
        expected = reloaded.eval()(input_ids=SAMPLE).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
