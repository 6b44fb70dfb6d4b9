"""Parameter groups by patterns of names: options, learning rates and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.configured import run_config
from support.gathered import Held, gathered, held
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch import config as configuration
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.consistency.layout import resolved
from axonlaunch.config.optimization.optimizer import AdamWConfig, MuonConfig, SGDConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.optimization.parameter_groups import state_bytes, with_options
from axonlaunch.models.build import build_model as build_model

MATRIX = ParameterFacts(name="layers.0.mlp.weight", shape=(4, 3), is_hidden_matrix=True)
BIAS = ParameterFacts(name="layers.0.mlp.bias", shape=(4,))
HEAD = ParameterFacts(name="lm_head.weight", shape=(7, 3))


def test_vectors_are_not_decayed_unless_a_group_says_so() -> None:
    config = AdamWConfig(weight_decay=0.1)
    assert with_options(config, MATRIX).weight_decay == 0.1
    assert with_options(config, BIAS).weight_decay == 0.0
    config = AdamWConfig(weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.2}})
    assert with_options(config, BIAS).weight_decay == 0.2


def test_later_parameter_group_pattern_overrides_each_option() -> None:
    groups = {"layers.*": {"lr": 1.0, "eps": 1e-3}, "*.bias": {"lr": 2.0}}
    chosen = with_options(AdamWConfig(groups=groups), BIAS)
    assert (chosen.lr, chosen.eps) == (2.0, 1e-3)


def test_lr_scale_multiplies_learning_rate_of_group() -> None:
    groups = {"*": {"lr": 2.0}, "*.bias": {"lr_scale": 0.5}}
    assert with_options(AdamWConfig(groups=groups), BIAS).lr == 1.0
    scaled = AdamWConfig(lr=3.0, groups={"*.bias": {"lr_scale": 0.5}})
    assert [with_options(scaled, p).lr for p in (BIAS, MATRIX)] == [1.5, 3.0]


def test_muon_applies_to_hidden_matrices_by_default() -> None:
    names = {p: with_options(MuonConfig(), p).name for p in (MATRIX, BIAS, HEAD)}
    assert names == {MATRIX: "muon", BIAS: "adamw", HEAD: "adamw"}
    groups = {"lm_head.*": {"algorithm": "muon"}, "layers.*": {"algorithm": "adamw"}}
    other = MuonConfig(groups=groups)
    assert [with_options(other, p).name for p in (MATRIX, HEAD)] == ["adamw", "muon"]


def test_adamw_within_muon_has_separate_learning_rate() -> None:
    config = MuonConfig(lr=0.02, adamw_lr=3e-4, groups={"*.bias": {"lr": 1e-5}})
    rates = [with_options(config, p).lr for p in (MATRIX, HEAD, BIAS)]
    assert rates == [0.02, 3e-4, 1e-5]


def test_a_group_without_momentum_has_no_state() -> None:
    config = SGDConfig(groups={"*.bias": {"momentum": 0.0}})
    assert [state_bytes(config, [p]) for p in (MATRIX, BIAS)] == [48, 0]


SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"),
    *("train.grad_clip=null", "scheduler=linear", "scheduler.warmup_steps=2", "train.steps=6"),
    *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0.1"),
    'optimizer.groups={"*.bias": {lr: 0.3}, "embed_*": {lr_scale: 0.5, momentum: 0}, '
    '"layers.1.*": {weight_decay: 0.2, lr: 0}}',
]
STEPS = 4
LAYOUTS = {
    "single": (1, "strategy=single"),
    "zero1": (2, "strategy=zero1"),
    "fsdp": (2, "strategy=fsdp"),
    "fsdp x tensor": (4, "strategy=fsdp strategy.tensor.degree=2"),
    "pipeline": (2, "strategy=pipeline train.micro_batch_size=4"),
}


def plain_sgd() -> dict[str, Tensor]:
    """Train by hand with torch's SGD: explicit parameter groups, rates by LambdaLR."""
    chosen = resolved(
        configuration.load([*SMALL, "strategy=single", "launch.nproc=1"]), accelerators=0
    )
    model = build_model(chosen.model, seed=chosen.seed)
    groups = []
    for name, p in model.named_parameters():
        lr = 0.3 if name.endswith(".bias") else 0.1
        decay = 0.1 if p.ndim > 1 else 0.0
        momentum = 0.9
        if name.startswith("embed_"):
            lr, momentum = 0.5 * lr, 0.0
        if name.startswith("layers.1."):
            lr, decay = 0.0, 0.2
        groups.append({"params": [p], "lr": lr, "weight_decay": decay, "momentum": momentum})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    factors = [
        0.5,
        1.0,
        1.0,
        0.7,
        0.4,
        0.1,
    ]  # up in two steps, then linearly down to a tenth at the sixth
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
    _, loader = World.mock(1).run(lambda world: rank_engine(chosen, world))[0]
    for step in range(STEPS):
        batch = loader.batch(step)
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_schedule_multiplies_learning_rate_of_each_group(layout: str) -> None:
    """In a pipeline, both ends of the tied embedding use the options of its name."""
    ranks, strategy = LAYOUTS[layout]
    chosen = run_config([*SMALL, *strategy.split(), f"launch.nproc={ranks}"])

    def run(world: World) -> dict[str, Held]:
        engine, loader = rank_engine(chosen, world)
        for step in range(STEPS):
            engine.train_step(loader.batch(step))
        return held(engine.named_parameters())

    expected, trained = plain_sgd(), gathered(World.mock(ranks).run(run))
    assert trained.keys() == expected.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['optimizer.groups={"*.bias": {weight_decy: 0}}'],
            "optimizer.groups.*.bias.weight_decy=0: there is no option of a group 'weight_decy'; "
            "did you mean weight_decay? known: betas, eps, lr, lr_scale, weight_decay",
        ),
        (
            ["optimizer.groups={*.bias:{lr:-1}}"],
            "optimizer.groups.*.bias.lr=-1: must be at least 0",
        ),
        (
            ["optimizer.groups={*.bias:{lr_scale:x}}"],
            "optimizer.groups.*.bias.lr_scale=x: expected a number",
        ),
        (
            ["optimizer.groups={*.bias:0}"],
            "optimizer.groups.*.bias=0: expected its options, {OPTION: value}",
        ),
        (["optimizer.groups=3"], "optimizer.groups=3: expected {PATTERN: {OPTION: value}}"),
        (
            ["optimizer.groups={*.bais:{lr:1}}"],
            "optimizer.groups.*.bais: matches no parameter that is trained; did you mean *.bias? "
            "names are embed_tokens.weight, ",
        ),
        (
            ["optimizer.groups={layers.7.*:{lr:1}}"],
            "optimizer.groups.layers.7.*: matches no parameter that is trained",
        ),
        (
            ["optimizer=muon", "optimizer.groups={*.bias:{algorithm:muon}}"],
            "optimizer.groups.*.bias.algorithm=muon: Muon is for matrices, and ",
        ),
        (
            ["optimizer=muon", "optimizer.groups={*:{algorithm:adamw}}"],
            "optimizer.name=muon: the model has no repeated blocks whose matrices Muon would",
        ),
        (
            ["optimizer=muon", "strategy.fsdp.cpu_offload=params", "strategy=fsdp"],
            "strategy.fsdp.cpu_offload=params: optimizer=muon exchanges parts of parameters among",
        ),
        (
            ["optimizer=adafactor", "strategy.fsdp.cpu_offload=full", "strategy=fsdp"],
            "strategy.fsdp.cpu_offload=full: optimizer=adafactor exchanges parts of parameters",
        ),
    ],
)
def test_invalid_parameter_groups_are_refused_before_start(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(["data=synthetic_tokens", "data.sequence_length=8", *overrides])
    assert any(str(problem).startswith(message) for problem in raised.value.problems), raised.value
