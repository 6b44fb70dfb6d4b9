"""Mixtures with divided experts train as one process does, in every layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hf_families import FAMILIES, ROUTED
from moe_layouts import EXPERTS, SETTINGS
from parity import assert_trains_as_one_process

from axonlaunch.config.problems.errors import plain

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
    assert_trains_as_one_process(overrides(kind, *settings), number, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixture_in_low_precision_trains_as_one_process(kind: str, precision: str) -> None:
    *settings, _ = EXPERTS["fsdp-2"]
    chosen = overrides(kind, *settings, f"train.precision={precision}")
    assert_trains_as_one_process(chosen, 2, steps=STEPS)
