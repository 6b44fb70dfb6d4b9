"""Mixtures with divided experts train as one process does, in every layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.hf_families import FAMILIES, ROUTED
from support.moe_layouts import EXPERTS, SETTINGS
from support.parity import assert_trains_as_one_process

from axonlaunch.config.problems.errors import plain
from axonlaunch.engines.expert.experts import sharded_dim

KINDS = ("moe_debug", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
STEPS = 5
BLOCKS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Four blocks, for the stages of a zero-bubble pipeline on two ranks."""


def overrides(kind: str, *more: str) -> list[str]:
    if kind == "moe_debug":
        return [*SETTINGS, "model.num_hidden_layers=4", *more]
    described = {**FAMILIES, **ROUTED}[kind]
    sizes = {key: value for key, value in BLOCKS.items() if key in described}
    return [
        *("model=hf", "model.init=random", f"model.config={plain({**described, **sizes})}"),
        *("data=synthetic_tokens", "data.sequence_length=16", "optimizer.eps=1e-6"),
        *more,
    ]


def cases() -> list[Any]:
    """Return the pairs of family and layout; one of them is fast."""
    return [
        pytest.param(*case, marks=() if case == ("deepseek_v3", "tensor-2") else pytest.mark.slow)
        for case in itertools.product(KINDS, EXPERTS)
    ]


@pytest.mark.parametrize(("kind", "layout"), cases())
def test_mixture_with_divided_experts_trains_as_one_process(kind: str, layout: str) -> None:
    *settings, ranks = EXPERTS[layout]
    number = int(ranks.removeprefix("launch.nproc="))
    is_beyond = layout == "1f1b-2"  # evaluation, prediction and checkpoint, too
    assert_trains_as_one_process(overrides(kind, *settings), number, steps=STEPS, beyond=is_beyond)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixture_in_low_precision_trains_as_one_process(kind: str, precision: str) -> None:
    *settings, _ = EXPERTS["fsdp-2"]
    chosen = overrides(kind, *settings, f"train.precision={precision}")
    assert_trains_as_one_process(chosen, 2, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 24], ids=["no dim", "third dim"])
def test_experts_that_shards_do_not_divide_evenly_train_as_one_process(width: int) -> None:
    """Three shards divide neither 4 experts nor 32 outputs, and 24 inputs but not 16."""
    layout = ["strategy=fsdp", "strategy.expert.degree=2", "train.global_batch_size=12"]
    chosen = overrides("moe_debug", *layout, f"model.moe_intermediate_size={width}")
    assert_trains_as_one_process(chosen, 6, steps=2)


@pytest.mark.parametrize(
    ("shape", "dim"), [((6, 8, 9), 0), ((4, 6, 9), 1), ((4, 8, 9), 2), ((4, 8, 8, 36), 0)]
)
def test_experts_are_sharded_in_the_first_dim_that_is_even(
    shape: tuple[int, ...], dim: int
) -> None:
    assert sharded_dim(shape, shards=3) == dim
