"""Checkpoints are complete or absent, and the same run resumes on any layout."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configured import run_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import Loader, rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import build_model

MODEL = ["model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4"]
DATA = ["data=synthetic_tokens", "data.sequence_length=12", "train.global_batch_size=8"]
TENSOR, PIPELINE = "strategy.tensor.degree=2", "strategy.pipeline.degree=2"
CONTEXT = "strategy.context.degree=2"
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp 2": (2, ["strategy=ddp"]),
    "zero1 4": (4, ["strategy=zero1"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "zero2 4": (4, ["strategy=zero2"]),
    "hsdp 2x2": (4, ["strategy=hsdp", "strategy.fsdp.replicate=2"]),
    "offloaded 2": (2, ["strategy=fsdp", "strategy.fsdp.cpu_offload=params"]),
    "tensor 2": (2, ["strategy=tensor"]),
    "pipeline 2": (2, ["strategy=pipeline", "train.micro_batch_size=2"]),
    "hybrid 2x2x2": (8, ["strategy=fsdp", TENSOR, PIPELINE, "train.micro_batch_size=2"]),
}
KINDS = {
    "ddp": ["strategy=ddp"],
    "zero1": ["strategy=zero1"],
    "fsdp": ["strategy=fsdp"],
    "zero2": ["strategy=zero2"],
}
AXES = {
    "tensor": [TENSOR],
    "pipeline": [PIPELINE, "train.micro_batch_size=2"],
    "context": [CONTEXT],
}
TWO_AXES = {
    **{f"{k} x {a}": (4, [*KINDS[k], *AXES[a]]) for k, a in itertools.product(KINDS, AXES)},
    **{f"{a} x {b}": (4, [*AXES[a], *AXES[b]]) for a, b in itertools.combinations(AXES, 2)},
    "hsdp x tensor": (8, ["strategy=hsdp", "strategy.fsdp.replicate=2", TENSOR]),
    "zero1 x tensor x pipeline": (8, [*KINDS["zero1"], TENSOR, *AXES["pipeline"]]),
}


def run(name: str, work: Callable[[Engine, Loader, World], Any], *extra: str) -> list[Any]:
    """Build a layout's engine on the mock world and return the result of ``work`` on each rank."""
    ranks, overrides = (LAYOUTS | TWO_AXES)[name]
    arguments = [*MODEL, *DATA, *overrides, f"launch.nproc={ranks}", "optimizer.eps=1e-5", *extra]
    chosen = run_config(arguments)
    layout = Layout.of(chosen, world_size=ranks)

    def on_rank(world: World) -> Any:
        loader = rank_loader(
            chosen, data.build_dataset(chosen.data), layout=layout, rank=world.rank
        )
        sample = sample_inputs(loader.dataset)
        return work(build_engine(chosen, world, sample=sample), loader, world)

    return World.mock(ranks).run(on_rank)


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Return full tensors of everything that the rank has shards of."""
    state = engine.state_dict()
    return {
        f"{kind}.{name}": (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for kind, tensors in state.items()
        for name, t in tensors.items()
    }


def merged(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the states of a pipeline's ranks."""
    return {name: tensor for state in states for name, tensor in state.items()}


def train(engine: Engine, loader: Loader, *, to: int) -> list[float]:
    return [float(engine.train_step(loader.batch(step)).loss) for step in range(engine.step, to)]


def save(engine: Engine, world: World, folder: Path, *, keep: int = 2) -> None:
    saver = Saver(folder, world=world, retention=Retention(newest=keep))
    samples = engine.step * 8
    saver.save(engine.state_dict(), step=engine.step, samples=samples, loss=1.5)


def load(engine: Engine, world: World, folder: Path) -> None:
    newest = checkpoint.latest(folder)
    assert newest is not None
    engine.load_state_dict(checkpoint.load_checkpoint(newest, engine.state_dict(), world=world))


@pytest.mark.slow(keep=1)
# A reader does not know who wrote, so each layout writes once and reads once.
@pytest.mark.parametrize(("writer", "reader"), [*itertools.pairwise([*LAYOUTS, "single"])])
def test_any_layout_loads_checkpoints_of_any_other(
    writer: str, reader: str, tmp_path: Path
) -> None:
    def write(
        engine: Engine, loader: Loader, world: World
    ) -> tuple[dict[str, Tensor], list[float]]:
        train(engine, loader, to=2)
        save(engine, world, tmp_path)
        return whole_state(engine), train(engine, loader, to=7)

    def read(engine: Engine, loader: Loader, world: World) -> tuple[dict[str, Tensor], list[float]]:
        load(engine, world, tmp_path)
        return whole_state(engine), train(engine, loader, to=7)

    states, curves = zip(*run(writer, write), strict=True)
    states_read, curves_read = zip(*run(reader, read), strict=True)
    written, read_back = merged(states), merged(states_read)
    assert read_back.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(read_back[name], tensor), name
    assert curves_read[0] == pytest.approx(curves[0], rel=1e-5)


STEADY = ["optimizer.lr=1e-3", "scheduler=constant", "scheduler.warmup_steps=0"]


@functools.cache
def in_plain_torch(steps: int) -> dict[str, Tensor]:
    """Train with only torch; return parameters and optimizer states by their saved names."""
    chosen = run_config([*MODEL, *DATA, "strategy=single"])
    model = build_model(chosen.model, seed=chosen.seed)
    loader = Loader(data.build_dataset(chosen.data), seed=chosen.seed, global_batch_size=8)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)
    for step in range(steps):
        batch = loader.batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
    states = {
        f"optimizer.{name}.{key}": value.clone()
        for name, parameter in named.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {f"model.{name}": p.detach().clone() for name, p in named.items()} | states


def assert_as_in_plain_torch(got: dict[str, Tensor], *, steps: int) -> None:
    """Compare full tensors, each relative to the largest number of its kind."""
    expected = in_plain_torch(steps)
    assert {name for name in got if not name.startswith("counters")} == expected.keys()
    largest: dict[str, float] = {}
    kinds = {n: "model" if n.startswith("model") else n.rpartition(".")[2] for n in expected}
    for name, tensor in expected.items():
        largest[kinds[name]] = max(largest.get(kinds[name], 0.0), float(tensor.abs().max()))
    for name, tensor in expected.items():
        difference = float((got[name] - tensor).abs().max())
        assert difference <= 1e-5 * largest[kinds[name]], f"{name} is off by {difference:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("writer", TWO_AXES)
def test_checkpoint_of_two_axes_read_by_one_process_equals_plain_torch(
    writer: str, tmp_path: Path
) -> None:
    def write(engine: Engine, loader: Loader, world: World) -> None:
        train(engine, loader, to=2)
        save(engine, world, tmp_path)

    def read(engine: Engine, loader: Loader, world: World) -> dict[str, Tensor]:
        load(engine, world, tmp_path)
        return whole_state(engine)

    run(writer, write, *STEADY)
    assert_as_in_plain_torch(run("single", read, *STEADY)[0], steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("reader", TWO_AXES)
def test_two_axes_resume_from_one_process_like_plain_torch(reader: str, tmp_path: Path) -> None:
    """The next step must be right, too: each rank needs the states of its rows."""

    def write(engine: Engine, loader: Loader, world: World) -> None:
        train(engine, loader, to=2)
        save(engine, world, tmp_path)

    def read(engine: Engine, loader: Loader, world: World) -> tuple[dict[str, Tensor], Any]:
        load(engine, world, tmp_path)
        taken = whole_state(engine)
        train(engine, loader, to=3)
        return taken, whole_state(engine)

    run("single", write, *STEADY)
    taken, after = zip(*run(reader, read, *STEADY), strict=True)
    assert_as_in_plain_torch(merged(list(taken)), steps=2)
    assert_as_in_plain_torch(merged(list(after)), steps=3)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["single", "ddp 2", "zero1 4", "fsdp 2"])
def test_resume_in_the_same_layout_is_bitwise_equal(name: str, tmp_path: Path) -> None:
    def undisturbed(engine: Engine, loader: Loader, world: World) -> list[float]:
        losses = train(engine, loader, to=3)
        save(engine, world, tmp_path)
        return losses + train(engine, loader, to=8)

    def resumed(engine: Engine, loader: Loader, world: World) -> list[float]:
        load(engine, world, tmp_path)
        return train(engine, loader, to=8)

    expected = run(name, undisturbed)[0][3:]
    assert run(name, resumed)[0] == expected


def test_fp16_keeps_its_loss_scale(tmp_path: Path) -> None:
    def write(engine: Engine, loader: Loader, world: World) -> float:
        train(engine, loader, to=2)
        state = engine.state_dict()
        state["counters"]["loss_scale"].fill_(128.0)
        engine.load_state_dict(state)
        save(engine, world, tmp_path)
        return float(engine.state_dict()["counters"]["loss_scale"])

    def read(engine: Engine, loader: Loader, world: World) -> float:
        load(engine, world, tmp_path)
        return float(engine.state_dict()["counters"]["loss_scale"])

    assert run("fsdp 2", write, "train.precision=fp16")[0] == 128.0
    assert run("fsdp 2", read, "train.precision=fp16")[0] == 128.0


def test_another_models_names_and_shapes_are_listed(tmp_path: Path) -> None:
    run("single", lambda engine, loader, world: save(engine, world, tmp_path))
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    with torch.device("meta"):
        other = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(7, 32)})
    reported = checkpoint.model_differences(newest, other)
    assert any("is unexpected" in line for line in reported)
    assert any("has shape" in line or "is missing" in line for line in reported)
