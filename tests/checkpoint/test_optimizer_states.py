"""A run resumes with the optimizer's states that it was saved with, or is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_engine import rank_engine

from axonlaunch import checkpoint, config
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import resolved
from axonlaunch.models.build import on_meta
from axonlaunch.preflight.checkpoint import checkpoint_problems

SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"),
]
MOMENTUM = "optimizer=sgd optimizer.weight_decay=0.1"
NO_MOMENTUM = f"{MOMENTUM} optimizer.momentum=0"


def chosen(folder: Path, *words: str) -> RunConfig:
    loaded = config.load([*SMALL, f"run_dir={folder}", *" ".join(words).split()])
    return resolved(loaded, accelerators=0)


def save(folder: Path, *words: str, steps: int = 1) -> None:
    run = chosen(folder, *words)

    def on_rank(world: World) -> None:
        engine, loader = rank_engine(run, world)
        for step in range(steps):
            engine.train_step(loader.batch(step))
        saver = Saver(folder, world=world, retention=Retention(newest=1))
        saver.save(engine.state_dict(), step=engine.step, samples=4 * engine.step)

    assert run.launch.nproc != "auto"
    World.mock(run.launch.nproc).run(on_rank)


def refusals(folder: Path, *words: str) -> list[str]:
    run = chosen(folder, "strategy=single", *words)
    return [str(one) for one in checkpoint_problems(run, on_meta(run.model, seed=0))]


@pytest.mark.parametrize("optimizer", ["optimizer=adamw", MOMENTUM, NO_MOMENTUM])
def test_the_same_optimizer_resumes(optimizer: str, tmp_path: Path) -> None:
    save(tmp_path, "strategy=single", optimizer)
    assert refusals(tmp_path, optimizer) == []


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (MOMENTUM, NO_MOMENTUM, "optimizer.momentum=0.0: * has states momentum_buffer; use what"),
        (NO_MOMENTUM, MOMENTUM, "optimizer.momentum=0.9: * has no states; use 0, as it was saved"),
        (
            MOMENTUM,
            "optimizer=adamw",
            "optimizer.name=adamw: * was saved with a different optimizer; it has ",
        ),
        (
            NO_MOMENTUM,
            "optimizer=adamw",
            "optimizer.name=adamw: * was saved with a different optimizer; it ",
        ),
        (
            "optimizer=adamw",
            NO_MOMENTUM,
            "optimizer.name=sgd: * was saved with a different optimizer; it has ",
        ),
    ],
)
def test_other_states_are_refused_with_what_is_at_fault(
    saved: str, resumed: str, message: str, tmp_path: Path
) -> None:
    save(tmp_path, "strategy=single", saved)
    [refusal] = refusals(tmp_path, resumed)
    for part in message.split("*"):
        assert part in refusal


@pytest.mark.parametrize("optimizer", [MOMENTUM, NO_MOMENTUM])
@pytest.mark.parametrize("layout", ["strategy=single", "strategy=zero1 launch.nproc=2"])
@pytest.mark.parametrize("saved_after", [0, 2])
def test_a_run_of_sgd_resumes_to_the_bit(
    optimizer: str, layout: str, saved_after: int, tmp_path: Path
) -> None:
    """Also from a checkpoint that was saved before any step."""
    run = chosen(tmp_path, layout, optimizer)
    assert run.launch.nproc != "auto"

    def straight(world: World) -> list[float]:
        engine, loader = rank_engine(run, world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(5)]

    def resume(world: World) -> list[float]:
        engine, loader = rank_engine(run, world)
        found = checkpoint.latest(tmp_path)
        assert found is not None
        engine.load_state_dict(checkpoint.load(found, engine.state_dict(), world=world))
        steps = range(engine.step, 5)
        return [float(engine.train_step(loader.batch(step)).loss) for step in steps]

    save(tmp_path, layout, optimizer, steps=saved_after)
    ranks = run.launch.nproc
    expected = World.mock(ranks).run(straight)[0][saved_after:]
    assert World.mock(ranks).run(resume)[0] == expected
