"""Errors of model=hf, in one line that says what to write instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.hf_families import FAMILIES

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.models.hf.architecture import architecture


def folder(tmp_path: Path, **content: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        architecture(HuggingFaceConfig(init="random", **settings))
    return str(caught.value)


def test_model_overrides_replace_file_values(tmp_path: Path) -> None:
    path = folder(tmp_path, **FAMILIES["llama"])
    changes = {"num_hidden_layers": 1, "rope_parameters": {"factor": 4.0}}
    described = architecture(HuggingFaceConfig(path=path, config=changes))
    assert described.num_hidden_layers == 1
    assert described.hidden_size == 64
    assert described.rope_parameters["factor"] == 4.0
    assert described.rope_parameters["rope_type"] == "llama3"


def test_an_override_may_use_the_name_that_all_families_share(tmp_path: Path) -> None:
    path = folder(tmp_path, model_type="gpt2", n_layer=5, n_embd=64, n_head=4)
    described = architecture(HuggingFaceConfig(path=path, config={"num_hidden_layers": 2}))
    assert described.n_layer == 2


def test_fewer_blocks_take_the_first_entries_of_lists_of_blocks(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    content = {**FAMILIES["gemma3_text"], "num_hidden_layers": 3, "layer_types": kinds}
    path = folder(tmp_path, **content)
    described = architecture(HuggingFaceConfig(path=path, config={"num_hidden_layers": 2}))
    assert described.layer_types == kinds[:2]


def test_override_of_rotary_base_applies(tmp_path: Path) -> None:
    path = folder(tmp_path, **FAMILIES["llama"])
    described = architecture(HuggingFaceConfig(path=path, config={"rope_theta": 777.0}))
    assert described.rope_parameters["rope_theta"] == 777.0


def test_an_unknown_override_is_reported_with_the_nearest_key() -> None:
    message = refusal(config={**FAMILIES["llama"], "hiden_size": 32})
    assert message == (
        "model.config.hiden_size=32: llama has no such key; did you mean model.config.hidden_size?"
    )


def test_a_value_of_another_type_is_refused() -> None:
    assert "num_hidden_layers" in refusal(config={**FAMILIES["llama"], "num_hidden_layers": "two"})


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    message = refusal(config={**FAMILIES["llama"], "num_attention_heads": 7})
    assert message.startswith("model.config={")
    assert "not a multiple" in message


def test_an_unknown_model_type_is_reported_with_the_nearest() -> None:
    message = refusal(config={"model_type": "qwen33"})
    assert "model.config.model_type=qwen33: is not known to transformers" in message
    assert "did you mean qwen3?" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "t5"}, "model_type=t5 is not a causal language model"),
        ({"model_type": "vit"}, "model_type=vit is not a causal language model"),
        ({"model_type": "bart"}, "model_type=bart is an encoder-decoder, which is not supported"),
        (
            {"model_type": "bert"},
            "model_type=bert is an encoder, in which tokens attend to later ones",
        ),
        ({"model_type": "gemma3"}, "model_type=gemma3 also takes images or sound"),
        ({"model_type": "xlnet"}, "model_type=xlnet predicts tokens in a random order"),
        ({}, "model_type=None is not known to transformers"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_non_causal_model_is_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = folder(tmp_path, **content)
    assert refusal(path=path).startswith(f"model.path={path}: {message}")


def test_an_encoder_that_is_set_to_be_a_decoder_is_taken() -> None:
    described = architecture(
        HuggingFaceConfig(config={"model_type": "bert", "is_decoder": True}, init="random")
    )
    assert described.model_type == "bert"


def test_a_folder_without_a_description_is_refused(tmp_path: Path) -> None:
    assert refusal(path=str(tmp_path)).startswith(f"model.path={tmp_path}: has no config.json")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_invalid_config_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json can't be read" in refusal(path=str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "../up", "a b"])
def test_a_folder_that_is_not_there_is_refused(path: str) -> None:
    assert refusal(path=path).startswith(f"model.path={path}: there is no such folder")


def test_a_model_id_that_is_not_in_the_cache_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refusal(path="someone/some-model")
    assert "hf download someone/some-model where there is a network" in message


def test_remote_code_is_not_run_unless_allowed(tmp_path: Path) -> None:
    code = "modeling_own.OwnForCausalLM"
    path = folder(tmp_path, model_type="own", auto_map={"AutoModelForCausalLM": code})
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it was run')")
    message = refusal(path=path)
    assert message.startswith("model.trust_remote_code=false: ")
    assert code in message


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "someone/kernels"},
        {"attn_implementation": {"": "paged|someone/kernels@main:function"}},
        {"text_config": {"_attn_implementation_internal": "someone/kernels"}},
        {"experts_implementation": "someone/kernels"},
    ],
)
def test_hub_kernels_are_not_fetched_and_run(named: dict[str, Any], tmp_path: Path) -> None:
    path = folder(tmp_path, **FAMILIES["llama"], **named)
    assert "whose code would be fetched and run; remove the key, and" in refusal(path=path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_more_blocks_than_any_model_has_are_refused_at_once(key: str, tmp_path: Path) -> None:
    path = folder(tmp_path, **{**FAMILIES["qwen3"], key: 10**9})
    assert f"{key}=1000000000: must be at most 10000" in refusal(path=path)


@pytest.mark.parametrize("prepared", ["link", "fifo"])
def test_config_json_that_is_special_file_is_refused(prepared: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.symlink_to("/etc/hostname") if prepared == "link" else os.mkfifo(file)
    assert f"{file} can't be read: is not a regular file" in refusal(path=str(tmp_path))


def test_known_family_uses_transformers_code(tmp_path: Path) -> None:
    brought = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    path = folder(tmp_path, **FAMILIES["llama"], auto_map=brought)
    assert type(architecture(HuggingFaceConfig(path=path))).__name__ == "LlamaConfig"


def test_model_type_override_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, **FAMILIES["llama"])
    message = refusal(path=path, config={"model_type": "qwen3"})
    assert message == "model.config.model_type=qwen3: model.path is llama; remove this setting"
