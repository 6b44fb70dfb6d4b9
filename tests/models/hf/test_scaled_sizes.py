"""Facts about a model of transformers for planning: width, heads, and repeated blocks."""

from __future__ import annotations

from typing import Any

import pytest
from configured import estimate_config
from hf_families import FAMILIES, SPECIAL

from axonlaunch import config as configs
from axonlaunch.config import RunConfig
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.build import on_meta
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.specs.source_of import source_of
from axonlaunch.planning.search.candidates import candidates
from axonlaunch.planning.throughput.step_work import step_work

DEEPSEEK = {**SPECIAL["deepseek_v3"], "first_k_dense_replace": 1}
FOUR_BLOCKS: dict[str, tuple[dict[str, Any], ScaledSizes]] = {
    "gpt2": (FAMILIES["gpt2"], ScaledSizes(64, 4, 4, num_blocks=4)),
    "llama": (FAMILIES["llama"], ScaledSizes(64, 4, 2, num_blocks=4)),
    "gemma2": (FAMILIES["gemma2"], ScaledSizes(64, 4, 2, num_blocks=4, period=2)),
    "deepseek_v3": (DEEPSEEK, ScaledSizes(64, 4, 4, num_blocks=4, leading=1)),
}


def described(config: dict[str, Any], blocks: int = 4) -> HuggingFaceConfig:
    return HuggingFaceConfig(init="random", config={**config, "num_hidden_layers": blocks})


@pytest.mark.parametrize("kind", FOUR_BLOCKS)
def test_block_repetition_is_detected_for_mixed_kinds(kind: str) -> None:
    config, sizes = FOUR_BLOCKS[kind]
    assert source_of(described(config)).scaled_sizes() == sizes


def run(config: HuggingFaceConfig, **changes: Any) -> RunConfig:
    plain = estimate_config(["data=synthetic_tokens", "data.sequence_length=16", "launch.nproc=1"])
    return configs.with_values(plain, {"model": config, **changes})


def test_reduced_depth_keeps_first_blocks() -> None:
    config = described(FAMILIES["gemma2"])
    fewer: Any = run(config)
    fewer = configs.with_values(fewer, source_of(config).with_blocks(2))
    assert structure(fewer.model).kinds == structure(config).kinds[:2]


def test_layouts_divide_heads_and_blocks() -> None:
    config = run(described(FAMILIES["gemma2"]))
    layouts = [*candidates(config, devices=8, in_node=8, fixed={})]
    assert {candidate.layout.tensor for candidate in layouts} == {1, 2, 4}
    assert {candidate.layout.pipeline for candidate in layouts} == {1, 2, 4}


@pytest.mark.slow
def test_flops_of_mixed_blocks_count_all_parameters() -> None:
    config = run(described(FAMILIES["gemma2"]))
    work = step_work(config, world_size=1)
    assert work.layers == (4,)
    assert work.parameters == sum(p.numel() for p in on_meta(config.model, seed=0).parameters())
