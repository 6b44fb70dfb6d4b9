"""Counts that are extrapolated linearly in layers and micro-batches equal those of a full trace."""

from __future__ import annotations

import dataclasses

import pytest
from configured import estimate_config

from axonlaunch.config import ConfigError
from axonlaunch.config.options.model import FreeModelConfig
from axonlaunch.planning.throughput import step_work
from axonlaunch.planning.throughput.operations import Amount, Kernel, Product, Work, add
from axonlaunch.planning.throughput.step_work import StageWork, StepWork
from axonlaunch.system.processes import forked_map

pytestmark = pytest.mark.processes

SMALL = [
    "model=llama_debug",
    "model.num_hidden_layers=4",
    "data=synthetic_tokens",
    "data.sequence_length=64",
    "train.precision=bf16",
]


def summed(stage: StageWork, *, layers: int, micro_batches: int) -> Work:
    micro = add(stage.micro_ends.work, stage.micro_layer.work, factor=layers)
    step = add(stage.step_ends.work, stage.step_layer.work, factor=layers)
    return add(step, micro, factor=micro_batches)


def full(overrides: list[str], *, stage: int = 0) -> Work:
    config = estimate_config(overrides)
    ((traced,),) = forked_map.map_forked([lambda: step_work._trace([config], stage=stage)])
    return traced.share.work


@pytest.fixture(scope="module")
def alone() -> StepWork:
    return step_work.step_work(estimate_config([*SMALL, "launch.nproc=1"]), world_size=1)


def same(first: Work, second: Work) -> bool:
    left = add(first, second, factor=-1)
    return all(
        abs(amount.count) < 1e-6 and abs(amount.num_bytes) < 64 and abs(amount.flops) < 1
        for amount in left.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            ["strategy=fsdp", "launch.nproc=4", "train.activation_checkpointing=full"],
            marks=pytest.mark.slow,
        ),
        ["strategy=ddp", "launch.nproc=4"],
        pytest.param(
            ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp", "ddp", "tensor"],
)
def test_step_work_is_linear_in_layers_and_micro_batches(strategy: list[str]) -> None:
    samples = 4 if "strategy=tensor" in strategy else 16  # 4 micro-batches of each data rank
    overrides = [*SMALL, *strategy, f"train.global_batch_size={samples}"]
    overrides += ["train.micro_batch_size=1"]
    config = estimate_config(overrides)
    ranks = config.launch.nproc
    assert ranks != "auto"
    reported = step_work.step_work(config, world_size=ranks)
    assert reported.layers == (4,)
    assert same(summed(reported.first, layers=4, micro_batches=4), full(overrides))


@pytest.mark.slow
def test_step_work_of_pipeline_ends_is_linear() -> None:
    overrides = [
        *SMALL,
        "strategy=pipeline",
        "strategy.pipeline.degree=2",
        "strategy.pipeline.schedule=1f1b",
        "strategy.pipeline.split=[3,3]",
        "model.num_hidden_layers=6",
        "launch.nproc=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    ]
    reported = step_work.step_work(estimate_config(overrides), world_size=2)
    assert reported.layers == (3, 3)
    for stage, mine in enumerate((reported.first, reported.last)):
        assert same(summed(mine, layers=3, micro_batches=4), full(overrides, stage=stage))


def test_step_work_counts_parameters_of_full_depth(alone: StepWork) -> None:
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    assert alone.parameters == 4 * layer + 2 * 256 * 128 + 128


def test_a_norm_is_one_kernel(alone: StepWork) -> None:
    names = {key.name for key in alone.first.micro_layer.work if isinstance(key, Kernel)}
    assert "aten::native_layer_norm" in names
    assert "aten::rsqrt" not in names


def test_every_product_of_a_layer_comes_once_forward_and_twice_backward(alone: StepWork) -> None:
    flops = {
        phase: sum(
            amount.flops
            for key, amount in alone.first.micro_layer.work.items()
            if isinstance(key, Product) and key.phase == phase
        )
        for phase in ("forward", "backward")
    }
    # llama_debug's layer: q and o 128 x 128, k and v 128 x 64, three of 128 x 384.
    weights = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384
    tokens = 16 * 64
    assert flops == {"forward": 2 * tokens * weights, "backward": 4 * tokens * weights}


def test_a_pipeline_of_a_model_without_depth_is_refused() -> None:
    config = estimate_config(
        [*SMALL, "strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"]
    )
    custom = dataclasses.replace(config, model=FreeModelConfig(name="llama"))
    with pytest.raises(ConfigError, match="do not repeat, so it can't be extrapolated"):
        step_work.step_work(custom, world_size=2)


def test_step_work_scales() -> None:
    assert Amount(1, 2, 3) * 2 == Amount(2, 4, 6)
