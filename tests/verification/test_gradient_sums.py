"""verify finds sums of gradients in 16 bits, which the rounding of products hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import without_folder
from support.parity_table import MODELS

from axonlaunch.comm import World
from axonlaunch.engines.data_parallel import fsdp
from axonlaunch.models.hf import model_spec as hf_spec
from axonlaunch.models.specs.model_spec import MixedSamples
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.comparison.gradient_sums import hides_rounded_sums, sum_differences
from axonlaunch.verification.comparison.layout_run import prepared_engine
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import Difference
from axonlaunch.verification.references.tolerances import SUM_TOLERANCE

BF16 = "train.precision=bf16"
BATCH = ["train.global_batch_size=16", "train.micro_batch_size=2"]
TENSOR = [
    *(*MODELS["gpt"], *BATCH, "strategy=fsdp", "strategy.tensor.degree=2", "launch.nproc=4"),
    "launch.backend=mock",
]
EXPERTS = [
    *("model=moe_debug", "model.hidden_size=32", "model.num_attention_heads=4", *BATCH, BF16),
    *("model.num_hidden_layers=2", "model.moe_intermediate_size=16", "model.vocab_size=64"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=16", "strategy=fsdp"),
    *("strategy.expert.degree=2", "launch.nproc=4", "launch.backend=mock"),
]

ZERO_BUBBLE = [
    *(*MODELS["gpt"], *BATCH, BF16, "strategy=fsdp", "launch.nproc=4", "launch.backend=mock"),
    *("strategy.pipeline.degree=2", "strategy.pipeline.schedule=zbv_zero_bubble"),
]


def largest(overrides: list[str]) -> Difference:
    """Return the largest difference of all parameters and ranks."""
    config = run_config(overrides)
    assert hides_rounded_sums(config)

    def run(world: World) -> list[Difference]:
        engine, loader = prepared_engine(config, world)
        return [*sum_differences(engine, loader.batch(0), config, rank=world.rank)]

    of_ranks = World.mock(4).run(run)
    return max((d for found in of_ranks for d in found), key=lambda d: d.relative)


def sum_in_bf16(patch: pytest.MonkeyPatch, unit: str) -> None:
    """Let the modules whose name contains a text reduce their gradients in bf16."""
    right = fsdp.fully_shard

    def shard(module: Any, *, mp_policy: Any, **options: Any) -> Any:
        if unit in type(module).__name__.lower():
            mp_policy = type(mp_policy)(torch.bfloat16, torch.bfloat16, None, False)
        return right(module, mp_policy=mp_policy, **options)

    patch.setattr(fsdp, "fully_shard", shard)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "overrides",
    [
        [*TENSOR, BF16],
        pytest.param([*TENSOR, "train.precision=fp16"], marks=pytest.mark.slow),
        EXPERTS,
        pytest.param(ZERO_BUBBLE, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp16", "experts", "zero bubble"],
)
def test_fp32_sums_of_16_bit_gradients_are_additive(overrides: list[str]) -> None:
    assert largest(overrides).relative < SUM_TOLERANCE / 10


def mixed_samples(model: Any) -> MixedSamples:
    """Return what a sample's loss depends on if the model computes the loss of its routers."""
    return "micro_batch" if model.config.output_router_logits else "none"


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_gradient_sums_in_bf16_are_found_with_router_loss(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4", *BATCH]
    overrides = without_folder("qwen3_moe", BF16, *layout, output_router_logits=True)
    config = run_config([*overrides, "launch.backend=mock"])
    assert not hides_rounded_sums(config)
    sum_in_bf16(monkeypatch, "experts")
    if not shares:  # as of models whose loss has other arguments, like Doge
        monkeypatch.setattr(hf_spec, "_mixed_samples", mixed_samples)
    result = on_mock(config, ComparisonPlan(steps=1))
    assert any("is not summed over" in difference for difference in result.differences)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["block", "experts"])
def test_gradients_summed_in_bf16_are_found(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = EXPERTS if unit == "experts" else [*TENSOR, BF16]
    sum_in_bf16(monkeypatch, unit)
    found = largest(overrides)
    assert found.relative > 10 * SUM_TOLERANCE
    assert str(found).startswith(f"step 1: the gradient of {found.name} is not summed over")


@pytest.mark.parametrize(
    ("overrides", "hides"),
    [
        ([BF16], True),
        (["train.precision=fp32"], False),
        ([BF16, "strategy.reduce_dtype=bf16"], False),
        ([BF16, "train.param_dtype=bf16"], False),
        (
            [
                *(BF16, "train.param_dtype=bf16", "train.grad_dtype=fp32"),
                "optimizer.master_weights=fp32",
            ],
            True,
        ),
    ],
)
def test_sums_are_checked_if_they_should_be_in_fp32(overrides: list[str], hides: bool) -> None:
    config = run_config([*MODELS["mlp"], "strategy=ddp", "launch.nproc=2", *overrides])
    assert hides_rounded_sums(config) == hides
