"""Checkpoints: whole or not at all, and the same run on any layout that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch import checkpoint, config, data
from axonlaunch.comm import World
from axonlaunch.config.layout import layout
from axonlaunch.data.loader import Loader
from axonlaunch.engines.base import Engine
from axonlaunch.engines.build import build

MODEL = ["model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4"]
DATA = ["data=synthetic_tokens", "data.sequence_length=12", "train.global_batch_size=8"]
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp 2": (2, ["strategy=ddp"]),
    "zero1 4": (4, ["strategy=zero1"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "zero2 4": (4, ["strategy=zero2"]),
    "hsdp 2x2": (4, ["strategy=hsdp", "strategy.fsdp.replicate=2"]),
    "offloaded 2": (2, ["strategy=fsdp", "strategy.fsdp.cpu_offload=params"]),
}
PAIRS = [
    *((name, "fsdp 2") for name in LAYOUTS),
    *(("fsdp 2", name) for name in LAYOUTS if name != "fsdp 2"),
    ("zero1 4", "hsdp 2x2"),
    ("hsdp 2x2", "single"),
]


def run(name: str, work: Callable[[Engine, Loader, World], Any], *extra: str) -> Any:
    """Build a layout's engine on the mock world and return what rank 0 makes of it."""
    ranks, overrides = LAYOUTS[name]
    words = [*MODEL, *DATA, *overrides, f"launch.nproc={ranks}", "optimizer.eps=1e-5", *extra]
    chosen = config.load(words)

    def on_rank(world: World) -> Any:
        loader = Loader(
            data.build(chosen.data),
            seed=chosen.seed,
            global_batch_size=8,
            num_shards=layout(chosen, world_size=ranks).data_ranks,
            shard=world.rank,
        )
        return work(build(chosen, world), loader, world)

    return World.mock(ranks).run(on_rank)[0]


def whole_state(engine: Engine) -> dict[str, Tensor]:
    state = engine.state_dict()
    named = {**state["model"], **state["optimizer"], **state["counters"]}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in named.items()
    }


def train(engine: Engine, loader: Loader, *, to: int) -> list[float]:
    return [float(engine.train_step(loader.batch(step)).loss) for step in range(engine.step, to)]


def save(engine: Engine, world: World, folder: Path, *, keep: int = 2) -> None:
    checkpoint.save(
        folder,
        engine.state_dict(),
        world=world,
        step=engine.step,
        samples=engine.step * 8,
        loss=1.5,
        keep=keep,
    )


def load(engine: Engine, folder: Path) -> None:
    found = checkpoint.latest(folder)
    assert found is not None
    engine.load_state_dict(checkpoint.load(found, engine.state_dict()))


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_any_layout_reads_what_any_layout_wrote(writer: str, reader: str, tmp_path: Path) -> None:
    def write(
        engine: Engine, loader: Loader, world: World
    ) -> tuple[dict[str, Tensor], list[float]]:
        train(engine, loader, to=2)
        save(engine, world, tmp_path)
        return whole_state(engine), train(engine, loader, to=4)

    def read(engine: Engine, loader: Loader, world: World) -> tuple[dict[str, Tensor], list[float]]:
        load(engine, tmp_path)
        return whole_state(engine), train(engine, loader, to=4)

    written, expected = run(writer, write)
    read_back, losses = run(reader, read, "seed=0")
    assert read_back.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(read_back[name], tensor), name
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["single", "ddp 2", "zero1 4", "fsdp 2"])
def test_on_the_same_layout_a_resumed_run_is_the_undisturbed_one_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    def undisturbed(engine: Engine, loader: Loader, world: World) -> list[float]:
        losses = train(engine, loader, to=3)
        save(engine, world, tmp_path)
        return losses + train(engine, loader, to=8)

    def resumed(engine: Engine, loader: Loader, world: World) -> list[float]:
        load(engine, tmp_path)
        return train(engine, loader, to=8)

    expected = run(name, undisturbed)[3:]
    assert run(name, resumed) == expected


def test_fp16_keeps_its_loss_scale(tmp_path: Path) -> None:
    def write(engine: Engine, loader: Loader, world: World) -> float:
        train(engine, loader, to=2)
        state = engine.state_dict()
        state["counters"]["loss_scale"].fill_(128.0)
        engine.load_state_dict(state)
        save(engine, world, tmp_path)
        return float(engine.state_dict()["counters"]["loss_scale"])

    def read(engine: Engine, loader: Loader, world: World) -> float:
        load(engine, tmp_path)
        return float(engine.state_dict()["counters"]["loss_scale"])

    assert run("fsdp 2", write, "train.precision=fp16") == 128.0
    assert run("fsdp 2", read, "train.precision=fp16") == 128.0


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 3."""

    def write(engine: Engine, loader: Loader, world: World) -> None:
        for step in (1, 2, 3):
            train(engine, loader, to=step)
            save(engine, world, tmp_path, keep=3)

    run("single", write)
    return tmp_path


def test_the_newest_is_latest_and_older_ones_are_pruned(three: Path) -> None:
    assert getattr(checkpoint.latest(three), "step", None) == 3
    checkpoint.prune(three, keep=2)
    assert sorted(path.name for path in (three / "checkpoints").iterdir()) == ["step_2", "step_3"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: next(folder.glob("*.distcp")).unlink(),
        lambda folder: next(folder.glob("*.distcp")).write_bytes(b"short"),
        lambda folder: folder.rename(folder.with_name("step_3.partial")),
        lambda folder: (folder / "manifest.json").write_text(
            json.dumps({**json.loads((folder / "manifest.json").read_text()), "format": 99})
        ),
    ],
    ids=["no manifest", "half a manifest", "a file gone", "a file cut", "unfinished", "newer"],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    three: Path, damage: Callable[[Path], object]
) -> None:
    damage(three / "checkpoints" / "step_3")
    assert getattr(checkpoint.latest(three), "step", None) == 2


def test_what_an_interrupted_save_left_is_swept(three: Path) -> None:
    (three / "checkpoints" / "step_4.partial").mkdir()
    assert checkpoint.sweep_partial(three) == ["step_4.partial"]
    assert getattr(checkpoint.latest(three), "step", None) == 3


def test_another_models_names_and_shapes_are_listed(three: Path) -> None:
    found = checkpoint.latest(three)
    assert found is not None
    with torch.device("meta"):
        other = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(7, 32)})
    told = checkpoint.differences(found, other)
    assert any("is unexpected" in line for line in told)
    assert any("has shape" in line or "is missing" in line for line in told)
