"""Checkpoints of divided experts move between layouts, are checked, and load in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.edited_checkpoints import resum
from support.hf_families import ROUTED, save
from support.hf_loops import SETTINGS
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.exchange.weights import export_weights, load_initial_weights
from axonlaunch.checkpoint.loading import diff, reader
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.models.tensors.dtensor_regions import full_tensor

EXPERT = ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4"]
MOVES = [
    ["strategy=fsdp", "strategy.expert.degree=4", "launch.nproc=4"],
    ["strategy=fsdp", "launch.nproc=2"],
    ["strategy=tensor", "launch.nproc=2"],
    [*EXPERT, "strategy.pipeline.degree=2"],
]
"""Layouts of one run, one step each."""


def chosen_for(model: Path, layout: list[str]) -> RunConfig:
    return run_config([*SETTINGS, f"model.path={model}", *layout])


def step_and_save(chosen: RunConfig, folder: Path, step: int) -> tuple[float, bool]:
    """Resume from the folder's newest checkpoint, train a step and save; return the loss, and
    whether every loaded tensor was equal to the saved one.
    """
    newest = checkpoint.latest(folder)
    saved: dict[str, Tensor] = {}
    if newest is not None:
        entries = reader.contents(newest)
        saved = dict(zip(entries, reader.tensors(newest, [*entries], entries), strict=True))

    def run(world: World) -> tuple[float, bool]:
        engine, loader = rank_engine(chosen, world)
        is_equal = True
        if newest is None:
            load_initial_weights(engine, chosen, world=world)
        else:
            state = checkpoint.load_checkpoint(newest, engine.state_dict(), world=world)
            engine.load_state_dict(state)
            for name, tensor in engine.state_dict()["model"].items():
                is_equal &= torch.equal(full_tensor(tensor), saved[f"model.{name}"])
        loss = float(engine.train_step(loader.batch(step)).loss)
        saver = Saver(folder, world=world, retention=Retention(newest=1))
        saver.save(engine.state_dict(), step=step + 1, samples=4 * step + 4)
        saver.close()
        return loss, is_equal

    assert chosen.launch.nproc != "auto"
    ranks = World.mock(chosen.launch.nproc).run(run)
    return ranks[0][0], all(is_equal for _, is_equal in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [[MOVES[0], MOVES[2]], pytest.param(MOVES, marks=pytest.mark.slow)]
)
def test_run_moves_between_expert_degrees_and_other_layouts(
    layouts: list[list[str]], tmp_path: Path
) -> None:
    save("qwen3_moe", tmp_path / "model")
    expected = losses_of_one_process(tmp_path / "model", steps=len(layouts))
    for step, layout in enumerate(layouts):
        chosen = chosen_for(tmp_path / "model", layout)
        loss, is_equal = step_and_save(chosen, tmp_path / "run", step)
        assert loss == pytest.approx(expected[step], rel=2e-5)
        assert is_equal, layout
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert diff.faults(newest, chosen) == []


def losses_of_one_process(model: Path, *, steps: int) -> list[float]:
    chosen = chosen_for(model, ["strategy=single", "launch.nproc=1"])

    def run(world: World) -> list[float]:
        engine, loader = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(steps)]

    return World.mock(1).run(run)[0]


def rewrite_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "index.json").write_text(json.dumps(index))
    resum(folder)


@pytest.mark.slow
def test_check_of_a_checkpoint_notices_missing_experts(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "model")
    chosen = chosen_for(tmp_path / "model", EXPERT)
    step_and_save(chosen, tmp_path / "run", 0)
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    index = json.loads((newest.path / "index.json").read_text())
    name = "model.layers.0.mlp.experts.down_proj"
    entry = index["tensors"][f"model.{name}"]
    of_second_rank = [chunk for chunk in entry["chunks"] if chunk["offsets"][0] >= 2]
    assert of_second_rank
    entry["chunks"] = [chunk for chunk in entry["chunks"] if chunk not in of_second_rank]
    rewrite_index(newest.path, index)
    assert diff.faults(newest, chosen) == [f"has an index.json that lacks parts of model.{name}"]
    entry["size"][0] = 2  # as if the experts of a rank were all experts
    rewrite_index(newest.path, index)
    assert diff.faults(newest, chosen) == [f"{name} has shape [2, 64, 32], not [4, 64, 32]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ROUTED)]
)
def test_export_of_divided_experts_loads_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save(kind, tmp_path / "model")
    chosen = chosen_for(tmp_path / "model", EXPERT)
    tokens = torch.arange(24)[None] % 200

    def run(world: World) -> Tensor:
        engine, loader = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        engine.train_step(loader.batch(0))
        saver = Saver(tmp_path / "run", world=world, retention=Retention(newest=1))
        saver.save(engine.state_dict(), step=1, samples=4)
        saver.close()
        return engine.predict(tokens).clone()

    expected = World.mock(4).run(run)[0]
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    export_weights(newest, chosen, tmp_path / "out")
    with torch.no_grad():
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        actual = model.eval()(input_ids=tokens).logits
    assert torch.allclose(actual, expected, atol=1e-5)
