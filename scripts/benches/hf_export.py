"""Trains a model of transformers for a step, exports it, and loads it with both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.format.step_folders import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import RunConfig, to_yaml, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.models.build import build_model
from axonlaunch.models.tensors.dtensor_regions import full_tensor

_TOLERANCE = 1e-6


def difference(config: RunConfig, folder: Path) -> str:
    """Train a step and export; return how a loaded model differs, or an empty text.

    Args:
        config: Checked configuration of the run.
        folder: Empty folder for the run and the export.
    """
    run_dir, out = folder / "run", folder / "out"
    run_dir.mkdir()
    config = with_values(config, {"run_dir": str(run_dir), "name": "run"})
    (run_dir / "config.yaml").write_text(to_yaml(config))
    trained = _trained(config, run_dir)
    saved = checkpoint.latest(run_dir)
    assert saved is not None
    weights.export_weights(saved, config, out, file_bytes=10**9)
    return _by_transformers(config, trained, out) or _by_us(config, trained, out)


def _engine(config: RunConfig, world: World) -> Any:
    dataset = data.build_dataset(config.data)
    return build_engine(config, world, sample=sample_inputs(dataset))


def _trained(config: RunConfig, run_dir: Path) -> dict[str, torch.Tensor]:
    """Save a run after its first step; return the full parameters and buffers."""

    def on_rank(world: World) -> dict[str, torch.Tensor]:
        engine = _engine(config, world)
        layout = Layout.of(config, world_size=world.world_size)
        dataset = data.build_dataset(config.data)
        loader = rank_loader(config, dataset, layout=layout, rank=world.rank)
        engine.train_step(loader.batch(0))
        state = engine.state_dict()
        saver = Saver(run_dir, world=world, retention=Retention(newest=1))
        saver.save(state, step=1, samples=4)
        return {name: full_tensor(tensor).clone() for name, tensor in state["model"].items()}

    return World.mock(num_ranks(config)).run(on_rank)[0]


def _by_transformers(config: RunConfig, trained: dict[str, torch.Tensor], out: Path) -> str:
    """Describe missing, unexpected or different values of ``from_pretrained``."""
    import transformers

    theirs, about = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    for what, names in about.items():
        if names:
            return f"from_pretrained reports {what}: {', '.join(map(str, list(names)[:4]))}"
    ours: Any = build_model(config.model, seed=0)
    ours.load_state_dict(trained, strict=False)  # tied parameters are stored under one name
    tokens = torch.arange(32).reshape(2, 16) + 3
    with torch.no_grad():
        expected = ours.eval()(tokens)
        seen = theirs.eval()(tokens, use_cache=False).logits
    expected = expected if isinstance(expected, torch.Tensor) else expected.logits
    off = float((seen - expected).abs().max() / expected.abs().max())
    return "" if off <= _TOLERANCE else f"logits of from_pretrained are off by {off:.1g}"


def _by_us(config: RunConfig, trained: dict[str, torch.Tensor], out: Path) -> str:
    """Name a parameter that differs at the start of a run from the exported folder."""
    pretrained = {"model.path": str(out), "model.init": "pretrained", "model.config": {}}
    again = with_values(config, pretrained)

    def on_rank(world: World) -> dict[str, torch.Tensor]:
        engine = _engine(again, world)
        weights.load_initial_weights(engine, again.model, world=world)
        return {name: full_tensor(t).clone() for name, t in engine.state_dict()["model"].items()}

    loaded = World.mock(num_ranks(config)).run(on_rank)[0]
    if missing := trained.keys() ^ loaded.keys():
        return f"model.path lacks or adds {', '.join(sorted(missing)[:4])}"
    other = [name for name, tensor in trained.items() if not torch.equal(tensor, loaded[name])]
    return f"model.path loads another {other[0]}" if other else ""
