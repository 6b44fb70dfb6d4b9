"""Parameters that are frozen by pattern: one process equals plain torch, and layouts equal one
process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configured import run_config
from support.parity import assert_trains_as_one_process
from support.rank_engine import rank_engine

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.engines.tensor.parallel_layers.local_parameters import TensorAxis
from axonlaunch.models.build import build_model, on_meta
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

SMALL = [
    *("model=gpt", "model.hidden_size=16", "model.num_hidden_layers=4"),
    *("model.num_attention_heads=2", "model.vocab_size=64", "model.max_position_embeddings=16"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=8"),
    *("train.grad_clip=null", "scheduler=constant", "checkpoint.every=0"),
]
FROZEN = [
    "train.freeze=[embed_*,layers.0.*,layers.*.mlp.*,norm.*]",
    "train.unfreeze=[layers.2.mlp.down_proj.*]",
]
"""Nothing of the first stage is trained, nor the head, which is tied to the embedding."""
LAYOUTS = {
    "ddp": "launch.nproc=2 strategy=ddp",
    "zero1": "launch.nproc=2 strategy=zero1",
    "zero2": "launch.nproc=2 strategy=zero2",
    "hsdp": "launch.nproc=4 strategy=hsdp strategy.fsdp.replicate=2",
    "offload": "launch.nproc=2 strategy=fsdp strategy.fsdp.cpu_offload=full",
    "offloaded states": "launch.nproc=2 strategy=fsdp strategy.fsdp.cpu_offload=optimizer_states",
    "tensor": "launch.nproc=2 strategy=tensor",
    "pipeline": "launch.nproc=2 strategy=pipeline",
    "zero bubble": "launch.nproc=2 strategy=pipeline strategy.pipeline.schedule=zbv_zero_bubble",
    "context": "launch.nproc=2 strategy=fsdp strategy.context.degree=2",
    "hybrid": "launch.nproc=8 strategy=hybrid strategy.tensor.degree=2 strategy.pipeline.degree=2",
    "recomputed": "launch.nproc=2 strategy=fsdp train.activation_checkpointing=full",
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parameters_stay_unchanged_in_every_layout(layout: str) -> None:
    nproc, *chosen = LAYOUTS[layout].split()
    ranks = int(nproc.removeprefix("launch.nproc="))
    verdict = assert_trains_as_one_process([*SMALL, *FROZEN, *chosen], ranks)
    assert verdict.parameters - len(verdict.frozen_parameters) == verdict.parameters_moved


def test_frozen_parameters_require_no_gradient_in_one_process() -> None:
    model = build_model(run_config([*SMALL, *FROZEN, "strategy=single"]), seed=0)
    for name, parameter in model.named_parameters():
        is_frozen = name.startswith(("embed_", "layers.0.", "norm.")) or ".mlp." in name
        is_trained = not is_frozen or name.startswith("layers.2.mlp.down_proj.")
        assert parameter.requires_grad == is_trained, name


def test_negative_numbers_of_blocks_count_from_the_last_frozen_one() -> None:
    chosen = ["train.freeze=['*']", "train.unfreeze=['*.-1.*','layers.-3.mlp.*']"]
    model = build_model(run_config([*SMALL, *chosen, "strategy=single"]), seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {name for name, _ in model.named_parameters()}
    assert trained == {n for n in names if n.startswith(("layers.3.", "layers.1.mlp."))}
    with pytest.raises(ConfigError, match=r"layers.-5.\* matches no parameter"):
        run_config([*SMALL, "train.freeze=['layers.-5.*']"])


def test_frozen_parameters_have_no_states_and_gradients() -> None:
    everything = TrainingShares.of(run_config([*SMALL, "strategy=single"]))
    some = TrainingShares.of(run_config([*SMALL, *FROZEN, "strategy=single"]))
    assert everything.gradients == 1
    per_gradient = [memory.states / memory.gradients for memory in (everything, some)]
    assert per_gradient == pytest.approx([2, 2], rel=0.01)  # and a step count
    model = on_meta(run_config([*SMALL, *FROZEN, "strategy=single"]), seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert some.gradients == trained / sum(p.numel() for p in model.parameters())


def test_tied_weight_is_frozen_by_either_name() -> None:
    model = on_meta(run_config([*SMALL, "train.freeze=[lm_head.*]", "strategy=single"]), seed=0)
    assert not model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ("train.freeze=[layer.0.*]", "train.freeze", "did you mean"),
        ("train.freeze=[head] train.unfreeze=[nrm.*]", "train.unfreeze", "did you mean norm."),
        ('train.freeze=["*"]', "train.freeze", "leaves no parameter that is trained"),
        (
            'train.freeze=["*"] train.unfreeze=[norm.*] optimizer.groups={"layers.*":{lr:1e-3}}',
            "optimizer.groups.layers.*",
            "matches no parameter that is trained",
        ),
    ],
)
def test_freeze_pattern_for_nothing_or_everything_is_refused(
    overrides: str, key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*SMALL, *overrides.split()])
    assert any(p.key == key and message in p.message for p in refused.value.problems)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["zero1", "pipeline"])
def test_a_run_with_frozen_parameters_resumes_on_another_layout(
    layout: str, tmp_path: Path
) -> None:
    overrides = [*SMALL, *FROZEN, "train.global_batch_size=8", "train.steps=4"]

    def losses(chosen: RunConfig, *, begin: int, end: int, save: bool) -> list[float]:
        def run(world: World) -> list[float]:
            engine, loader = rank_engine(chosen, world)
            if begin:
                saved = checkpoint.find_checkpoint(tmp_path)
                assert saved is not None
                state = checkpoint.load_checkpoint(saved, engine.state_dict(), world=world)
                engine.load_state_dict(state)
            values = [float(engine.train_step(loader.batch(n)).loss) for n in range(begin, end)]
            if save:
                saver = Saver(tmp_path, world=world, retention=Retention(newest=1))
                saver.save(engine.state_dict(), step=end, samples=0)
                saver.close()
            return values

        assert chosen.launch.nproc != "auto"
        return World.mock(chosen.launch.nproc).run(run)[0]

    full = losses(run_config([*overrides, "strategy=single"]), begin=0, end=4, save=False)
    first = run_config([*overrides, *LAYOUTS[layout].split()])
    assert losses(first, begin=0, end=2, save=True) == pytest.approx(full[:2], rel=1e-5)
    again = run_config([*overrides, *LAYOUTS["tensor"].split()])
    assert losses(again, begin=2, end=4, save=False) == pytest.approx(full[2:], rel=1e-5)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["ddp", "zero bubble"])
def test_verify_compares_trained_and_counts_frozen_parameters(layout: str) -> None:
    chosen = run_config([*SMALL, *FROZEN, "train.global_batch_size=8", *LAYOUTS[layout].split()])
    verdict = compare.on_mock(chosen, ComparisonPlan(steps=3))
    assert verdict.passed, verdict.differences
    model = on_meta(chosen, seed=0)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert set(verdict.frozen_parameters) == frozen
    assert frozen.isdisjoint(verdict.unproved_parameters)


def test_verify_finds_trained_frozen_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = TensorAxis._local_parameter

    def trained(axis: TensorAxis, parameter: Any, cut: Any) -> Any:
        return original(axis, parameter, cut).requires_grad_()

    monkeypatch.setattr(TensorAxis, "_local_parameter", trained)
    overrides = [*SMALL, *FROZEN, "train.global_batch_size=8", *LAYOUTS["tensor"].split()]
    verdict = compare.on_mock(run_config(overrides), ComparisonPlan(steps=2))
    assert verdict.verdict == "failed"
