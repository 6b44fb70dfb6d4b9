"""Blocks, ends and ties are derived from the model, whatever their names are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configured import run_config
from support.hf_families import FAMILIES

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.config.problems.errors import plain
from axonlaunch.models.hf.analysis.structure import Structure, structure
from axonlaunch.preflight.inspection import inspect


def of(kind: str, **changes: Any) -> Structure:
    content = {**FAMILIES.get(kind, {"model_type": kind}), **changes}
    return structure(HuggingFaceConfig(config=content, init="random"))


ENDS = {
    "gpt2": ("transformer.h", ["transformer.wte", "transformer.wpe"], ["transformer.ln_f"]),
    "opt": (
        "model.decoder.layers",
        ["model.decoder.embed_tokens", "model.decoder.embed_positions"],
        ["model.decoder.final_layer_norm"],
    ),
    "gpt_neox": ("gpt_neox.layers", ["gpt_neox.embed_in"], ["gpt_neox.final_layer_norm"]),
    "bloom": (
        "transformer.h",
        ["transformer.word_embeddings", "transformer.word_embeddings_layernorm"],
        ["transformer.ln_f"],
    ),
}
TIED = {"gpt2", "opt", "gemma2", "gemma3_text", "bloom"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_ends_and_ties_are_found(kind: str) -> None:
    model = of(kind)
    layers, first_modules, after = ENDS.get(
        kind, ("model.layers", ["model.embed_tokens"], ["model.norm"])
    )
    assert model.layers == layers
    assert model.flow.problem == ""
    assert list(model.flow.before_blocks) == first_modules
    heads = ([*after, "lm_head"], [*after, "embed_out"])  # the second for GPT-NeoX
    assert list(model.flow.after_blocks) in heads
    assert len(model.kinds) == 2
    assert dict(model.ties) == (
        {"lm_head.weight": f"{first_modules[0]}.weight"} if kind in TIED else {}
    )


def test_blocks_of_several_kinds_are_distinguished() -> None:
    model = of("gemma2", num_hidden_layers=3)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert model.kinds == tuple(f"Gemma2DecoderLayer({kind})" for kind in kinds)


def test_blocks_without_plan_are_only_module_list() -> None:
    small = {"d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4, "vocab_size": 99}
    model = of("bart", is_encoder_decoder=False, is_decoder=True, **small)
    assert model.layers == "model.decoder.layers"
    assert len(model.kinds) == 3


def test_a_model_without_one_list_of_blocks_says_so() -> None:
    model = of("hrm_text", hidden_size=64, num_attention_heads=4, intermediate_size=64)
    assert model.layers is None
    assert "model.L_module.layers, model.H_module.layers" in model.no_layers
    assert model.flow.problem == model.no_layers


def test_structure_of_large_model_takes_no_memory() -> None:
    large = of("mixtral", num_local_experts=2048, hidden_size=4096, intermediate_size=16384)
    assert sum(p.numel() for p in large.model.parameters()) > 10**11
    assert all(parameter.is_meta for parameter in large.model.parameters())
    assert large.copy() is not large.copy()
    assert of("mixtral") is of("mixtral")


def test_a_description_that_has_changed_is_read_again(tmp_path: Path) -> None:
    for layers in (1, 2):
        content = {**FAMILIES["llama"], "num_hidden_layers": layers}
        (tmp_path / "config.json").write_text(json.dumps(content))
        model = structure(HuggingFaceConfig(path=str(tmp_path), init="random"))
        assert len(model.kinds) == layers


def test_inspection_says_which_layouts_are_legal_and_why_others_are_not() -> None:
    content = plain(FAMILIES["gemma2"]).replace(":", ": ")
    inspected = inspect(run_config(["model=hf", f"model.config={content}", "model.init=random"]))
    assert inspected.model == "Gemma2ForCausalLM"
    assert inspected.blocks == {
        "Gemma2DecoderLayer(sliding_attention)": 1,
        "Gemma2DecoderLayer(full_attention)": 1,
    }
    assert inspected.cut_points == ["model.layers.1"]
    assert inspected.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert inspected.tensor_plan["model.layers.*.mlp.down_proj"] == "row"
    legal = {answer.layout: answer.legal for answer in inspected.layouts}
    assert legal["strategy=fsdp"]
    assert legal["strategy.pipeline.degree=2"]
    assert all(answer.reason for answer in inspected.layouts if not answer.legal)


def test_builtin_model_can_be_inspected() -> None:
    inspected = inspect(
        run_config(
            [
                "model=llama_debug",
                "model.num_attention_heads=5",
                "model.num_key_value_heads=5",
                "model.hidden_size=40",
            ]
        )
    )
    assert inspected.blocks == {"LlamaBlock": 4} or list(inspected.blocks.values()) == [4]
    reasons = {answer.layout: answer.reason for answer in inspected.layouts}
    assert "5" in reasons["strategy.tensor.degree=2"]
    assert reasons["strategy.pipeline.degree=2"] == ""
