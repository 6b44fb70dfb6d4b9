"""Errors in a plan are reported without starting ranks, once per pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.tensor_cases import (
    GPT,
    LLAMA,
    TIED_LLAMA,
    VIT,
)
from torch import nn

from axonlaunch.config.options.model import MLPConfig
from axonlaunch.engines.tensor.plan_checks import plan_issues
from axonlaunch.models.build import construct, spec_for


def found(module: nn.Module, plan: Mapping[str, str], **options: Any) -> list[tuple[str, str]]:
    return plan_issues(module, plan, **{"degree": 2, "sequence_parallel": False, **options})


def feed_forward(width: int = 130) -> nn.Module:
    layers = nn.ModuleList(
        nn.ModuleDict({"up_proj": nn.Linear(8, width), "norm": nn.LayerNorm(8)}) for _ in range(3)
    )
    return nn.ModuleDict({"layers": layers, "embed": nn.Embedding(130, 8)})


@pytest.mark.parametrize(
    ("plan", "degree", "expected"),
    [
        (
            {"layers.*.up_proj": "column", "embed": "vocabulary"},
            4,
            [
                (
                    "layers.*.up_proj",
                    "layers.0.up_proj has 130 outputs, which 4 does not divide; use a degree of "
                    "1, 2, 5, 10, 13, 26, 65 or 130",
                ),
            ],
        ),
        (
            {"embed": "vocabulary"},
            25,
            [
                (
                    "embed",
                    "embed's tokens=130 leaves the last of 25 ranks without any; use "
                    "1, 2, 5, 10, 13, 26, 65 or 130",
                )
            ],
        ),
        (
            {"layers.*.up_proj": "row"},
            3,
            [
                (
                    "layers.*.up_proj",
                    "layers.0.up_proj has 8 inputs, which 3 does not divide; use a degree of "
                    "1, 2, 4 or 8",
                )
            ],
        ),
        (
            {"layers.*.up_porj": "column"},
            2,
            [
                (
                    "layers.*.up_porj",
                    "matches no module and no parameter; the model has layers.*.up_proj, "
                    "layers.*.norm, layers.*",
                )
            ],
        ),
        (
            {"decoder.h.*": "column"},
            2,
            [("decoder.h.*", "matches no module and no parameter; the model has embed, layers")],
        ),
        (
            {"embed": "colum"},
            2,
            [
                (
                    "embed",
                    "there is no style 'colum'; did you mean column? known: column, row, "
                    "vocabulary, sequence, region, replicated, "
                    "column_gathered, row_split, packed_column, packed_row, key_value, experts, "
                    "averaged, local, replicated_summed, full_sequence",
                )
            ],
        ),
        (
            {"layers.*.norm": "column", "embed": "row"},
            2,
            [
                (
                    "embed",
                    "names embed, of type Embedding; row is for nn.Linear with its standard "
                    "forward and weight",
                ),
                (
                    "layers.*.norm",
                    "names layers.0.norm, of type LayerNorm; column is for nn.Linear with its "
                    "standard forward and weight",
                ),
            ],
        ),
        (
            {"layers.*.norm": "vocabulary"},
            2,
            [
                (
                    "layers.*.norm",
                    "names layers.0.norm, of type LayerNorm; vocabulary is for nn.Linear and a "
                    "plain nn.Embedding",
                )
            ],
        ),
        (
            {"layers.0": "region"},
            2,
            [
                (
                    "layers.0",
                    "names layers.0, of type ModuleDict; a region needs layers of style column, "
                    "and the plan has none in it",
                )
            ],
        ),
        (
            {"layers": "region", "layers.?": "region", "layers.*.up_proj": "column"},
            2,
            [
                (
                    "layers.?",
                    "names layers.0, of type ModuleDict; it is inside another region, and an "
                    "input can enter only once",
                )
            ],
        ),
    ],
)
def test_tensor_plan_errors_are_reported_once_per_pattern(
    plan: dict[str, str], degree: int, expected: list[tuple[str, str]]
) -> None:
    with torch.device("meta"):
        module = feed_forward()
    assert sorted(found(module, plan, degree=degree)) == expected


@pytest.mark.parametrize("config", [LLAMA, TIED_LLAMA, GPT, VIT, MLPConfig()])
def test_tensor_plans_of_builtin_models_are_valid(config: Any) -> None:
    model, spec = construct(config, seed=0), spec_for(config)
    assert not found(model, spec.plan(model), sequence_parallel=spec.sequence_parallel)


@pytest.mark.parametrize(
    ("config", "degree", "expected"),
    [
        (GPT, 3, ["num_attention_heads=8 is not divisible by it; use 1, 2, 4 or 8"]),
        (LLAMA, 8, ["num_key_value_heads=4 is not divisible by it; use 1, 2 or 4"]),
    ],
)
def test_heads_that_the_degree_does_not_divide_are_reported_once(
    config: Any, degree: int, expected: list[str]
) -> None:
    model = construct(config, seed=0)
    assert [("", m) for m in expected] == found(model, spec_for(config).plan(model), degree=degree)


def test_tied_weights_need_one_tensor_style() -> None:
    model = construct(TIED_LLAMA, seed=0)
    plan = {**spec_for(TIED_LLAMA).plan(model), "lm_head": "replicated"}
    assert found(model, plan) == [
        (
            "",
            "lm_head.weight is embed_tokens.weight, and the plan shards them differently "
            "(replicated and vocabulary); give both one style",
        )
    ]


def test_sequence_parallel_plan_must_name_all_modules() -> None:
    model = construct(GPT, seed=0)
    plan = spec_for(GPT).plan(model)
    del plan["layers.*_layernorm"]
    assert not found(model, plan)
    assert found(model, plan, sequence_parallel=True) == [
        (
            "",
            "sequence_parallel: the plan does not name layers.0.input_layernorm; give it the style "
            "sequence if it sees only a part of the sequence, otherwise replicated",
        )
    ]
    assert not found(model, {**plan, "layers.*norm": "replicated"}, sequence_parallel=True)
