"""A run resumes with its saved optimizer states, or is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rank_engine import rank_engine

from axonlaunch import checkpoint, config
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import resolved
from axonlaunch.models.build import on_meta
from axonlaunch.preflight.checkpoint import checkpoint_problems

SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"),
]
MOMENTUM = "optimizer=sgd optimizer.weight_decay=0.1"
NO_MOMENTUM = f"{MOMENTUM} optimizer.momentum=0"


def chosen(folder: Path, *overrides: str) -> RunConfig:
    loaded = config.load([*SMALL, f"run_dir={folder}", *" ".join(overrides).split()])
    return resolved(loaded, accelerators=0)


def save(folder: Path, *overrides: str, steps: int = 1) -> None:
    run = chosen(folder, *overrides)

    def on_rank(world: World) -> None:
        engine, loader = rank_engine(run, world)
        for step in range(steps):
            engine.train_step(loader.batch(step))
        saver = Saver(folder, world=world, retention=Retention(newest=1))
        saver.save(engine.state_dict(), step=engine.step, samples=4 * engine.step)

    assert run.launch.nproc != "auto"
    World.mock(run.launch.nproc).run(on_rank)


def refusals(folder: Path, *overrides: str) -> list[str]:
    run = chosen(folder, "strategy=single", *overrides)
    return [str(problem) for problem in checkpoint_problems(run, on_meta(run.model, seed=0))]


@pytest.mark.parametrize("optimizer", ["optimizer=adamw", MOMENTUM, NO_MOMENTUM])
def test_the_same_optimizer_resumes(optimizer: str, tmp_path: Path) -> None:
    save(tmp_path, "strategy=single", optimizer)
    assert refusals(tmp_path, optimizer) == []


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (MOMENTUM, NO_MOMENTUM, "optimizer.momentum=0.0: * has states momentum_buffer; use the"),
        (
            NO_MOMENTUM,
            MOMENTUM,
            "optimizer.momentum=0.9: * has no states; use 0, as in the",
        ),
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
def test_states_of_another_optimizer_are_refused_with_the_cause(
    saved: str, resumed: str, message: str, tmp_path: Path
) -> None:
    save(tmp_path, "strategy=single", saved)
    [refusal] = refusals(tmp_path, resumed)
    for part in message.split("*"):
        assert part in refusal


ADAFACTOR, MUON = "optimizer=adafactor", "optimizer=muon"
NADAM = "optimizer=nadam optimizer.groups={*.bias:{lr_scale:0.5}}"
ZERO1 = "strategy=zero1 launch.nproc=2"
FSDP = "strategy=fsdp launch.nproc=4"
MIXED = "strategy=fsdp strategy.tensor.degree=2 launch.nproc=4"


def straight(folder: Path, layout: str, optimizer: str, steps: int = 5) -> list[float]:
    run = chosen(folder, layout, optimizer)

    def on_rank(world: World) -> list[float]:
        engine, loader = rank_engine(run, world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(steps)]

    assert run.launch.nproc != "auto"
    return World.mock(run.launch.nproc).run(on_rank)[0]


def resumed(folder: Path, layout: str, optimizer: str, steps: int = 5) -> list[float]:
    run = chosen(folder, layout, optimizer)

    def on_rank(world: World) -> list[float]:
        engine, loader = rank_engine(run, world)
        newest = checkpoint.latest(folder)
        assert newest is not None
        engine.load_state_dict(checkpoint.load_checkpoint(newest, engine.state_dict(), world=world))
        left = range(engine.step, steps)
        return [float(engine.train_step(loader.batch(step)).loss) for step in left]

    assert run.launch.nproc != "auto"
    return World.mock(run.launch.nproc).run(on_rank)[0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("optimizer", "layout", "saved_after"),
    [
        (MOMENTUM, "strategy=single", 0),  # before any step
        (MOMENTUM, ZERO1, 2),
        (NO_MOMENTUM, ZERO1, 0),
        (NO_MOMENTUM, "strategy=single", 2),
        (NADAM, ZERO1, 0),
        (NADAM, FSDP, 2),
        ("optimizer=lion", FSDP, 2),
        (ADAFACTOR, FSDP, 2),
        (ADAFACTOR, MIXED, 0),
        (MUON, ZERO1, 2),
        (MUON, MIXED, 2),
    ],
)
def test_a_run_resumes_to_the_bit(
    optimizer: str, layout: str, saved_after: int, tmp_path: Path
) -> None:
    save(tmp_path, layout, optimizer, steps=saved_after)
    expected = straight(tmp_path, layout, optimizer)[saved_after:]
    assert resumed(tmp_path, layout, optimizer) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "saved", "loaded"),
    [
        (NADAM, MIXED, "strategy=single"),
        (NADAM, "strategy=pipeline train.micro_batch_size=2 launch.nproc=2", ZERO1),
        ("optimizer=lion optimizer.eps=1e-4", ZERO1, MIXED),
        (ADAFACTOR, FSDP, "strategy=single"),
        (ADAFACTOR, "strategy=single", MIXED),
        (ADAFACTOR, MIXED, ZERO1),
        (MUON, "strategy=single", MIXED),
        (MUON, FSDP, "strategy=pipeline train.micro_batch_size=2 launch.nproc=2"),
    ],
)
def test_a_run_resumes_in_another_layout_to_rounding(
    optimizer: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    deeper = "model.num_hidden_layers=2"
    save(tmp_path, saved, optimizer, deeper, steps=2)
    expected = straight(tmp_path, "strategy=single", f"{optimizer} {deeper}")[2:]
    got = resumed(tmp_path, loaded, f"{optimizer} {deeper}")
    assert got == pytest.approx(expected, rel=1e-5 if optimizer != MUON else 1e-4)


def test_parameter_groups_with_other_states_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "strategy=single", MOMENTUM)
    [refusal] = refusals(tmp_path, MOMENTUM, "optimizer.groups={*.bias:{momentum:0}}")
    assert refusal.startswith("optimizer.groups={*.bias:{momentum:0.0}}: ")
    assert "was saved with other groups: it has layers.0.input_layernorm.bias.momentum" in refusal


def test_adafactor_does_not_take_adams_states(tmp_path: Path) -> None:
    save(tmp_path, "strategy=single", "optimizer=adam")
    [refusal] = refusals(tmp_path, ADAFACTOR)
    assert "was saved with a different optimizer; it has states exp_avg, exp_avg_sq, st" in refusal


def test_resuming_from_the_folder_of_checkpoints_names_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("name: run\n")
    [refusal] = refusals(tmp_path / "new", f"checkpoint.resume={run}/checkpoints")
    assert refusal.endswith(f"there is no complete checkpoint in it; give the run, {run}")
