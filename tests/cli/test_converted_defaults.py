"""Defaults of other tools are in the experiment: warm-up, prompts, decay, loss of routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from axonlaunch.config.validation.other_tools.translate import convert_file
from axonlaunch.config.validation.other_tools.translation import Translation

AXOLOTL = {"base_model": "org/base", "datasets": [{"path": "rows.jsonl", "type": "chat_template"}]}
LLAMAFACTORY = {"model_name_or_path": "org/base", "stage": "sft", "finetuning_type": "full"}
TRL = {"model_name_or_path": "org/base", "dataset_name": "org/rows"}
MODELS = "torchtune.models"
ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}
TORCHTUNE = {
    "model": {"_component_": f"{MODELS}.llama3.llama3_8b"},
    "tokenizer": {"_component_": f"{MODELS}.llama3.llama3_tokenizer"},
    "checkpointer": {"checkpoint_dir": "model"},
    "dataset": ALPACA,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def converted(folder: Path, tool: dict[str, Any], devices: int = 1, **keys: Any) -> Translation:
    file = folder / "other.yaml"
    file.write_text(yaml.safe_dump({**tool, **keys}))
    return convert_file(file, devices=devices)


def values(translation: Translation) -> dict[str, Any]:
    return {key: setting.value for key, setting in translation.settings.items()}


def left_out(translation: Translation) -> list[str]:
    return [remark.key for remark in translation.remarks if remark.kind == "left out"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"scheduler.warmup_ratio": 0.03}),
        ({"max_steps": 200}, {"scheduler.warmup_steps": 6}),
        ({"max_steps": 90_000}, {"scheduler.warmup_steps": 100}),
        ({"warmup_steps": 0}, {"scheduler.warmup_ratio": 0.0}),
        ({"warmup_ratio": 0.2}, {"scheduler.warmup_ratio": 0.2}),
    ],
)
def test_axolotl_warms_up_for_3_percent_of_at_most_100_steps(
    given: dict[str, float], expected: dict[str, float], folder: Path
) -> None:
    written = values(converted(folder, AXOLOTL, **given))
    assert {key: each for key, each in written.items() if "warmup" in key} == expected


def test_batch_size_of_axolotl_is_that_of_a_device(folder: Path) -> None:
    keys = {"batch_size": 8, "micro_batch_size": 2}
    written = values(converted(folder, AXOLOTL, devices=4, **keys))
    assert written["train.global_batch_size"] == 8 * 4
    assert written["train.micro_batch_size"] == 2


def test_held_out_files_of_several_datasets_belong_to_the_first_source(folder: Path) -> None:
    datasets = [{"path": f"{name}.jsonl", "type": "chat_template"} for name in ("a", "b")]
    tests = [{"path": "c.jsonl", "type": "chat_template"}]
    written = values(converted(folder, AXOLOTL, datasets=datasets, test_datasets=tests))
    held_out = {key: each for key, each in written.items() if key.endswith(".held_out")}
    files = {"files": ["c.jsonl"]}
    assert held_out == {"data.held_out": 0, "data.mix.a.held_out": files}


@pytest.mark.parametrize(
    ("kind", "packs", "packing"),
    [
        ("completion", True, "concat"),
        ("completion", False, "none"),
        ("chat_template", True, "best_fit"),
        ("chat_template", False, "none"),
    ],
)
def test_long_documents_of_axolotl_are_not_lost(
    kind: str, packs: bool, packing: str, folder: Path
) -> None:
    datasets = [{"path": "rows.jsonl", "type": kind}]
    translation = converted(folder, AXOLOTL, datasets=datasets, sample_packing=packs)
    assert values(translation)["data.packing"] == packing
    notes = [remark.key for remark in translation.remarks]
    assert notes == (["datasets"] if (kind, packs) == ("completion", False) else [])


@pytest.mark.parametrize(
    ("given", "packing"),
    [({}, "concat"), ({"packing": True}, "concat"), ({"packing": False}, "none")],
)
def test_llamafactory_packs_documents_unless_a_file_says_otherwise(
    given: dict[str, bool], packing: str, folder: Path
) -> None:
    written = values(converted(folder, LLAMAFACTORY, stage="pt", **given))
    assert written["data.packing"] == packing


def test_axolotl_uploads_to_a_private_repository(folder: Path) -> None:
    written = values(converted(folder, AXOLOTL, hub_model_id="org/tuned"))
    assert written["checkpoint.push_private"] is True


def test_key_that_axolotl_ignores_sets_no_last_rate(folder: Path) -> None:
    translation = converted(folder, AXOLOTL, eta_min=1e-6, learning_rate=1e-5)
    assert values(translation)["scheduler.final_lr_ratio"] == 0.0
    assert [each.key for each in translation.remarks] == ["eta_min"]


def test_learning_rates_of_modules_are_groups(folder: Path) -> None:
    groups = [{"name": "head", "modules": ["lm_head"], "lr": 1e-4}]
    written = values(converted(folder, AXOLOTL, embedding_lr=1e-3, lr_groups=groups))
    assert written["optimizer.groups"] == {
        "*embed_tokens*": {"lr": 1e-3, "weight_decay": 0.0},
        "*lm_head*": {"lr": 1e-4},
    }


@pytest.mark.parametrize(
    "entry",
    [
        {"train_on_eos": "all"},
        {"message_field_training": "learn"},
        {"message_field_training_detail": "detail"},
        {"split_thinking": True},
        {"skip": 10},
        {"roles": {"user": ["customer", "caller"]}},
        {"roles": {"system": ["rules"]}},
        {"message_property_mappings": {"role": "who", "tool_calls": "calls"}},
        {"field_thinking": "thoughts"},
    ],
    ids=str,
)
def test_datasets_of_axolotl_that_are_read_differently_are_left_out(
    entry: dict[str, Any], folder: Path
) -> None:
    datasets = [{"path": "rows.jsonl", "type": "chat_template", **entry}]
    [key] = left_out(converted(folder, AXOLOTL, datasets=datasets))
    assert key in {f"datasets.0.{name}" for name in (*entry, "message_property_mappings")}


def test_dataset_without_an_account_is_left_out(folder: Path) -> None:
    datasets = [{"path": "wikitext", "name": "wikitext-103-v1", "type": "completion"}]
    translation = converted(folder, AXOLOTL, datasets=datasets)
    assert left_out(translation) == ["datasets.0.path"]
    assert "data.subset" not in values(translation)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"ask": "Add."}, "S: Be brief.\nQ: Add.\nA:"),
        ({"ask": "Add.", "rules": "Be kind."}, "S: Be kind.\nQ: Add.\nA:"),
        ({"ask": "Add.", "input": "1 2"}, "S: Be brief.\nQ: Add. (1 2)\nA:"),
    ],
)
def test_prompts_of_axolotl_have_a_system_text(
    row: dict[str, str], prompt: str, folder: Path
) -> None:
    kind = {
        "system_prompt": "Be brief.",
        "system_format": "S: {system}\n",
        "field_system": "rules",
        "field_instruction": "ask",
        "format": "Q: {instruction} ({input})\nA:",
        "no_input_format": "Q: {instruction}\nA:",
    }
    translation = converted(folder, AXOLOTL, datasets=[{"path": "rows.jsonl", "type": kind}])
    text = values(translation)["data.prompt_format"]
    template = jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    assert template.render(row) == prompt


@pytest.mark.parametrize("tool", [AXOLOTL, LLAMAFACTORY], ids=["axolotl", "llamafactory"])
def test_loss_of_routers_is_off_as_in_these_tools(tool: dict[str, Any], folder: Path) -> None:
    assert values(converted(folder, tool))["model.router_aux_loss"] is False


@pytest.mark.parametrize(
    ("tool", "keys", "weight"),
    [
        (AXOLOTL, {"model_config": {"output_router_logits": True}}, None),
        (LLAMAFACTORY, {"moe_aux_loss_coef": 0.02}, 0.02),
        (TRL, {}, None),
        (TRL, {"model_name_or_path": "Qwen/Qwen3-30B-A3B"}, None),
        (TRL, {"router_aux_loss_coef": 0.01}, 0.01),
        (TRL, {"router_aux_loss_coef": 0.0}, False),
    ],
)
def test_weight_of_the_loss_of_routers_is_kept(
    tool: dict[str, Any], keys: dict[str, Any], weight: float | None, folder: Path
) -> None:
    assert values(converted(folder, tool, **keys)).get("model.router_aux_loss") == weight


def test_template_without_thoughts_of_llamafactory_is_chatml(folder: Path) -> None:
    written = values(converted(folder, LLAMAFACTORY, template="qwen3_nothink"))
    assert written["data.chat_template"] == "chatml"


def test_quantized_weights_of_the_hub_are_left_out(folder: Path) -> None:
    translation = converted(folder, LLAMAFACTORY, model_name_or_path="org/Llama-3-8B-AWQ")
    assert left_out(translation) == ["dataset", "model_name_or_path"]


def test_trl_trains_in_bf16_and_recomputes(folder: Path) -> None:
    written = values(converted(folder, TRL))
    assert written["train.precision"] == "bf16"
    assert written["train.activation_checkpointing"] == "full"
    assert values(converted(folder, TRL, bf16=False))["train.precision"] == "fp32"


@pytest.mark.parametrize(
    ("tokenizer", "template", "key"),
    [
        ("llama3.llama3_tokenizer", "llama3", "fields"),
        ("qwen3.qwen3_tokenizer", "chatml", "fields"),
        ("phi3.phi3_mini_tokenizer", "phi3", "fields"),
        ("gemma.gemma_tokenizer", None, "prompt_format"),
        ("llama2.llama2_tokenizer", None, "prompt_format"),
    ],
)
def test_prompts_of_torchtune_are_in_the_template_of_its_tokenizer(
    tokenizer: str, template: str | None, key: str, folder: Path
) -> None:
    keys = {"tokenizer": {"_component_": f"{MODELS}.{tokenizer}"}}
    written = values(converted(folder, TORCHTUNE, **keys))
    assert written.get("data.chat_template") == template
    assert {name for name in ("fields", "prompt_format") if f"data.{name}" in written} == {key}
    if tokenizer.startswith("llama2"):
        assert written["data.prompt_format"].startswith("[INST] Below is an instruction")
        assert written["data.prompt_format"].endswith("### Response:\n [/INST] ")


def test_torchtune_decays_vectors_too(folder: Path) -> None:
    written = values(converted(folder, TORCHTUNE))
    assert written["optimizer.groups"] == {"*": {"weight_decay": 0.01}}
    adapted = {"model": {"_component_": f"{MODELS}.llama3.lora_llama3_8b"}}
    assert "optimizer.groups" not in values(converted(folder, TORCHTUNE, **adapted))


@pytest.mark.parametrize("tool", [AXOLOTL, LLAMAFACTORY], ids=["axolotl", "llamafactory"])
def test_first_layer_that_stays_out_of_fp8_is_a_note(tool: dict[str, Any], folder: Path) -> None:
    translation = converted(folder, tool, fp8=True)
    [remark] = [each for each in translation.remarks if each.key == "fp8"]
    assert remark.kind == "note"
    assert "train.matmul_exclude" in remark.text


def test_weights_by_entropy_of_llamafactory_are_translated(folder: Path) -> None:
    keys = {"use_eaft_loss": True, "eaft_alpha": 2.0, "label_smoothing_factor": 0.1}
    translation = converted(folder, LLAMAFACTORY, **keys)
    assert values(translation)["train.eaft"] == 2.0
    assert "train.label_smoothing" not in values(translation)
    assert left_out(translation) == ["dataset"]


def test_larger_weights_by_entropy_of_axolotl_are_clipped_alike(folder: Path) -> None:
    """Its weights are 3 ** alpha times as large, and so are the gradients that it clips at 1."""
    written = values(converted(folder, AXOLOTL, use_eaft=True, eaft_alpha=2.0, eaft_k=20))
    assert written["train.eaft"] == 2.0
    assert written["train.grad_clip"] == pytest.approx(1 / 9)
    assert left_out(converted(folder, AXOLOTL, use_eaft=True, eaft_k=5)) == ["eaft_k"]


@pytest.mark.parametrize(
    ("tool", "keys", "key"),
    [
        (
            TORCHTUNE,
            {
                "model": {
                    "_component_": f"{MODELS}.llama3.lora_llama3_8b",
                    "lora_attn_modules": ["q_proj"],
                    "apply_lora_to_output": True,
                }
            },
            "model.apply_lora_to_output",
        ),
        (
            AXOLOTL,
            {"adapter": "lora", "lora_target_modules": ["model.embed_tokens", "q_proj", "lm_head"]},
            "lora_target_modules",
        ),
        (
            LLAMAFACTORY,
            {"finetuning_type": "lora", "lora_target": "q_proj,lm_head"},
            "lora_target",
        ),
    ],
    ids=["torchtune", "axolotl", "llamafactory"],
)
def test_adapters_of_heads_and_embeddings_are_left_out(
    tool: dict[str, Any], keys: dict[str, Any], key: str, folder: Path
) -> None:
    translation = converted(folder, tool, **keys)
    assert values(translation)["adapter.targets"] == ["q_proj"]
    texts = [each.text for each in translation.remarks if each.key == key]
    assert any("train.unfreeze=['*lm_head*'] trains it in full" in text for text in texts)
    assert key in left_out(translation)


EVALUATED = {
    "eval_strategy": "steps",
    "dataset_test_split": "test",
    "load_best_model_at_end": True,
    "early_stopping_patience": 3,
}


@pytest.mark.parametrize(
    ("keys", "metric", "omitted"),
    [
        ({}, None, []),
        ({"metric_for_best_model": "eval_loss", "greater_is_better": False}, None, []),
        ({"metric_for_best_model": "eval_accuracy", "greater_is_better": True}, "accuracy", []),
        ({"metric_for_best_model": "eval_mean_token_accuracy"}, "accuracy", []),
        ({"metric_for_best_model": "rouge"}, None, ["metric_for_best_model"]),
        (
            {"metric_for_best_model": "accuracy", "greater_is_better": False},
            None,
            ["greater_is_better"],
        ),
        ({"greater_is_better": True}, None, ["greater_is_better"]),
    ],
)
def test_best_metric_is_translated_or_left_out(
    keys: dict[str, Any], metric: str | None, omitted: list[str], folder: Path
) -> None:
    translation = converted(folder, TRL, **EVALUATED, **keys)
    written = values(translation)
    assert written["train.early_stop"] == 3
    assert written.get("train.best_metric") == metric
    assert written.get("metrics") == (metric and [metric])
    assert left_out(translation) == omitted


def test_metric_without_early_stop_or_best_checkpoint_is_ignored(folder: Path) -> None:
    assert left_out(converted(folder, TRL, metric_for_best_model="rouge")) == []


def test_export_of_the_best_checkpoint_is_a_note(folder: Path) -> None:
    keys = {"push_to_hub": True, "hub_model_id": "org/tuned"}
    translation = converted(folder, TRL, **EVALUATED, **keys)
    [remark] = [each for each in translation.remarks if each.key == "load_best_model_at_end"]
    assert remark.kind == "note"
    assert "checkpoint export" in remark.text
    assert "--push" in remark.text
    assert values(translation)["checkpoint.push"] == "org/tuned"


@pytest.mark.parametrize(
    ("tool", "keys", "kept"),
    [
        (TRL, {}, {"keep_every_n_steps": 1}),
        (TRL, {"save_total_limit": 0}, {"keep_every_n_steps": 1}),
        (TRL, {"save_total_limit": 3}, {"keep_last": 3}),
        (TRL, {"save_strategy": "no"}, {}),
        (LLAMAFACTORY, {}, {"keep_every_n_steps": 1}),
        (AXOLOTL, {}, {"keep_last": 4}),
        (AXOLOTL, {"saves_per_epoch": 0}, {}),
        (TORCHTUNE, {}, {"keep_every_n_steps": 1}),
        (
            TORCHTUNE,
            {"checkpointer": {"checkpoint_dir": "model", "keep_last_n_checkpoints": 2}},
            {"keep_last": 2},
        ),
    ],
)
def test_as_many_checkpoints_are_kept_as_by_the_tool(
    tool: dict[str, Any], keys: dict[str, Any], kept: dict[str, int], folder: Path
) -> None:
    written = values(converted(folder, tool, **keys))
    prefix = "checkpoint.keep_"
    assert {
        key.removeprefix("checkpoint."): value
        for key, value in written.items()
        if key.startswith(prefix)
    } == kept


def test_adapted_layers_of_phi3_have_the_names_of_transformers(folder: Path) -> None:
    model = {"_component_": f"{MODELS}.phi3.lora_phi3_mini", "apply_lora_to_mlp": True}
    translation = converted(folder, TORCHTUNE, model=model)
    targets = ["qkv_proj", "gate_up_proj", "down_proj"]
    assert values(translation)["adapter.targets"] == targets
    assert not translation.changes_training
