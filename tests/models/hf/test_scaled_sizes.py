"""Facts about a model of transformers for planning: width, heads, and repeated blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configured import estimate_config
from support.hf_families import FAMILIES, SPECIAL

from axonlaunch import config as configs
from axonlaunch.config import RunConfig
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.build import on_meta
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.source_of import source_of
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


LFM2_MOE = {
    "model_type": "lfm2_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 2,
}


def test_lists_of_blocks_are_as_long_as_a_traced_model_that_is_deeper() -> None:
    types = ["full_attention" if n % 4 == 2 else "conv" for n in range(10)]
    config = described({**LFM2_MOE, "layer_types": types}, blocks=10)
    sizes = source_of(config).scaled_sizes()
    assert (sizes.num_blocks, sizes.leading, sizes.period) == (10, 2, 4)
    deeper: Any = configs.with_values(run(config), source_of(config).with_blocks(2 + 8 * 4))
    typed = structure(deeper.model).typed
    assert typed.layer_types == ["full_attention" if n % 4 == 2 else "conv" for n in range(34)]


def test_blocks_that_are_dense_only_at_the_given_depth_do_not_repeat() -> None:
    dense = {**SPECIAL["deepseek_v3"], "first_k_dense_replace": 2}
    assert source_of(described(dense, blocks=2)).scaled_sizes().num_blocks == 0


def test_blocks_after_mixtures_of_another_kind_do_not_repeat() -> None:
    config = described({**FAMILIES["qwen3_moe"], "mlp_only_layers": [0, 3]}, blocks=8)
    assert source_of(config).scaled_sizes().num_blocks == 0


@pytest.mark.slow
def test_lists_in_files_are_as_long_as_a_deeper_model_with_an_irregular_beginning(
    tmp_path: Path,
) -> None:
    types = ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)]
    content = {**FAMILIES["llama"], "model_type": "lfm2", "num_hidden_layers": 24}
    del content["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**content, "layer_types": types}))
    config = HuggingFaceConfig(path=str(tmp_path), init="random")
    sizes = source_of(config).scaled_sizes()
    assert (sizes.num_blocks, sizes.leading, sizes.period) == (24, 16, 3)
    deeper: Any = configs.with_values(run(config), source_of(config).with_blocks(16 + 8 * 3))
    kinds = structure(config).kinds
    assert structure(deeper.model).kinds == (*kinds, *[*kinds[18:21]] * 5, kinds[18])[:40]


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
