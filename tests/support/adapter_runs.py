"""Trains adapters on saved models of transformers, exports them and resumes their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.exchange.base_weights import record_base
from axonlaunch.checkpoint.exchange.weights import export_weights, load_initial_weights
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import RunConfig, with_values
from support.configured import run_config
from support.hf_loops import SETTINGS
from support.rank_engine import rank_engine

LORA = ["adapter=lora", "adapter.rank=4", "adapter.alpha=6"]
TOKENS = torch.arange(24)[None] % 200


def trained(overrides: list[str], run_dir: Path, *, steps: int = 2) -> tuple[RunConfig, Tensor]:
    """Train on the mock world and save; return the configuration and the logits of some tokens."""
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Tensor:
        engine, loader = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        for step in range(steps):
            engine.train_step(loader.batch(step))
        saver = Saver(run_dir, world=world, retention=Retention(newest=1))
        saver.save(engine.state_dict(), step=steps, samples=4 * steps)
        saver.close()
        if world.is_main:
            record_base(with_values(chosen, {"run_dir": str(run_dir)}))
        return engine.predict(TOKENS).clone()

    return chosen, World.mock(chosen.launch.nproc).run(run)[0]


def export(chosen: RunConfig, run_dir: Path, out: Path, *, merge: bool) -> list[str]:
    newest = checkpoint.find_checkpoint(run_dir)
    assert newest is not None
    return export_weights(newest, chosen, out, merge=merge)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    outputs: Tensor = model.eval()(input_ids=TOKENS).logits
    return outputs


def continued(overrides: list[str], run_dir: Path) -> Tensor:
    """Resume on another layout, as a rank does; return the logits."""
    chosen = run_config([*overrides, f"checkpoint.resume={run_dir}"])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Tensor:
        engine, _ = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        saved = checkpoint.find_checkpoint(run_dir)
        assert saved is not None
        state = checkpoint.load_checkpoint(saved, engine.state_dict(), world=world)
        engine.load_state_dict(state)
        return engine.predict(TOKENS).clone()

    return World.mock(chosen.launch.nproc).run(run)[0]
