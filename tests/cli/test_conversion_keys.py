"""Single keys of other tools: offloading, experts, patterns, tokens, steps and losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.other_tools import (
    AXOLOTL,
    FILES,
    LLAMAFACTORY,
    TRL,
    Converter,
    check_values,
    left_out,
    values_of,
)


@pytest.mark.parametrize(
    ("tool", "added", "mode"),
    [
        ("axolotl", "activation_offloading: true", "offload"),
        ("axolotl", "gradient_checkpointing: offload", "offload"),
        ("axolotl", "gradient_checkpointing: true\nactivation_offloading: false", "full"),
        ("trl", "gradient_checkpointing: true\nactivation_offloading: true", "offload"),
        ("torchtune", "enable_activation_offloading: true", "offload"),
        (
            "torchtune",
            "ac_mode: selective\nenable_activation_offloading: true",
            "selective_offload",
        ),
    ],
)
def test_offloaded_activations_are_translated(
    tool: str, added: str, mode: str, convert: Converter
) -> None:
    setting = convert(FILES[tool], added).settings["train.activation_checkpointing"]
    assert setting.value == mode


@pytest.mark.parametrize("value", [True, False])
def test_update_in_backward_of_torchtune_is_translated(value: bool, convert: Converter) -> None:
    translation = convert(FILES["torchtune"], f"optimizer_in_bwd: {str(value).lower()}")
    assert translation.settings["train.optimizer_in_backward"].value is value


@pytest.mark.parametrize(
    ("tool", "added"),
    [
        ("axolotl", "expert_parallel_size: 4"),
        ("llamafactory", "expert_model_parallel_size: 4"),
    ],
)
def test_an_expert_degree_becomes_fsdp_with_divided_experts(
    tool: str, added: str, convert: Converter
) -> None:
    translation = convert(FILES[tool], added)
    assert translation.options["strategy"].value == "fsdp"
    assert translation.settings["strategy.expert.degree"].value == 4
    assert "strategy" not in convert(FILES[tool], f"{added[:-1]}1").options


@pytest.mark.parametrize(
    ("tool", "added", "key"),
    [
        (
            "axolotl",
            "adapter: lora\nlora_target_linear: false\nloraplus_lr_ratio: 4\n"
            "lora_target_modules: [lm_head, embed_tokens]\nlora_modules_to_save: [norm]",
            "lora_target_modules",
        ),
        (
            "llamafactory",
            "lora_target: lm_head,embed_tokens\nadditional_target: norm",
            "lora_target",
        ),
        (
            "trl",
            "use_peft: true\nlora_target_modules: [lm_head, embed_tokens]\n"
            "lora_modules_to_save: [norm]",
            "lora_target_modules",
        ),
    ],
)
def test_adapter_of_the_head_alone_becomes_a_trained_head(
    tool: str, added: str, key: str, convert: Converter
) -> None:
    translation = convert(FILES[tool], added)
    assert left_out(translation)[key].startswith(
        "only layers of the blocks can be adapted; lm_head"
    )
    assert "adapter" not in translation.options
    assert translation.settings["train.freeze"].value == ["*"]
    trained = ["*lm_head*", "*embed_tokens*", "*norm*"]
    assert translation.settings["train.unfreeze"].value == trained
    groups = {
        name for name in translation.settings if name.startswith(("adapter.", "optimizer.gr"))
    }
    assert not groups


@pytest.mark.parametrize(
    ("added", "targets"),
    [
        (r"lora_target_modules: '.*\.layers.[\d]+.mlp'", [r"(.*\.layers.[\d]+.mlp)"]),
        (
            "lora_target_modules: model.language_model.layers.0.(q|k)_proj",
            ["(model.(language_model.)?layers.0.(q|k)_proj)"],
        ),
        (
            r"lora_target_modules: .*language_model.*\.(q_proj|v_proj)",
            [r"(.*language_model.*\.(q_proj|v_proj))"],
        ),
        ("lora_target_modules: q_proj\nlora_target_parameters: [e.up]", ["q_proj", "*e.up"]),
        ("lora_target_linear: true\nlora_target_parameters: [e.up]", ["(.*)", "*e.up"]),
    ],
)
def test_regular_expressions_of_layers_stay_regular_expressions(
    added: str, targets: list[str], convert: Converter, tmp_path: Path
) -> None:
    translation = convert(AXOLOTL.replace("lora_target_linear: true", added))
    assert not translation.changes_training
    assert values_of(translation, tmp_path)["adapter.targets"] == targets


def test_prompts_that_a_file_writes_out_become_a_prompt_format(convert: Converter) -> None:
    kind = {
        "field_instruction": "question",
        "field_input": "context",
        "field_output": "reply",
        "format": "Q: {instruction}\n{input}\nA:",
        "no_input_format": "Q: {instruction}\nA:",
    }
    datasets = [{"path": "rows.jsonl", "type": kind}]
    translation = convert(yaml.safe_dump({"base_model": "org/base", "datasets": datasets}))
    chosen = translation.settings["data.prompt_format"].value
    assert chosen == (
        "{% if context is defined and context %}Q: {{ question }}\n{{ context }}\nA:"
        "{% else %}Q: {{ question }}\nA:{% endif %}"
    )
    assert translation.settings["data.fields"].value == {"completion": "reply"}


def test_special_and_added_tokens_are_those_of_the_tokenizer(
    convert: Converter, tmp_path: Path
) -> None:
    added = "special_tokens: {eos_token: <|end|>, pad_token: <pad>}\ntokens: [<tool>]"
    check_values(
        values_of(convert(AXOLOTL, added), tmp_path),
        {
            "tokenizer.special.eos": "<|end|>",
            "tokenizer.special.pad": "<pad>",
            "tokenizer.add_tokens": ["<tool>"],
        },
    )
    values = values_of(convert(TRL, "eos_token: <|end|>"), tmp_path)
    assert values["tokenizer.special.eos"] == "<|end|>"


@pytest.mark.parametrize(
    ("added", "saved", "evaluated"),
    [
        ("save_steps: 100\neval_steps: 50", 100, 50),
        ("save_steps: 0.25", "1 epoch", "1 epoch"),
        ("save_strategy: no\neval_strategy: epoch", 0, "1 epoch"),
        ("save_strategy: best\neval_steps: 20", 20, 20),
    ],
)
def test_steps_of_axolotl_need_no_strategy(
    added: str, saved: object, evaluated: object, convert: Converter, tmp_path: Path
) -> None:
    lines = [line for line in AXOLOTL.splitlines() if "per_epoch" not in line]
    values = values_of(convert("\n".join(lines), f"\n{added}"), tmp_path)
    assert values["checkpoint.every"] == saved
    assert values["train.eval_every"] == evaluated


def test_unfrozen_parameters_become_patterns(convert: Converter) -> None:
    written = ["^lm_head.weight$", r"model.layers.4[4-9]+.gate", r"model\.layers\.\d+\.norm.*"]
    written.append("^model.language_model.*")
    adapted = convert(AXOLOTL, yaml.safe_dump({"unfrozen_parameters": written}))
    assert "train.freeze" not in adapted.settings
    full = AXOLOTL.replace("adapter: lora", "")
    translation = convert(full, yaml.safe_dump({"unfrozen_parameters": written}))
    assert translation.settings["train.freeze"].value == ["*"]
    patterns = ["lm_head.weight", "model.layers.4[4-9].gate*", "model.layers.*.norm**", "model.**"]
    assert translation.settings["train.unfreeze"].value == patterns
    (remark,) = (
        each
        for each in convert(full, "unfrozen_parameters: ['(a|b).weight']").remarks
        if each.kind == "left out"
    )
    assert remark.text == "write (a|b).weight as a pattern in train.unfreeze"


def test_shortest_rows_of_axolotl_are_translated(convert: Converter, tmp_path: Path) -> None:
    translation = convert(AXOLOTL, "min_sample_len: 20\n")
    assert left_out(translation) == {}
    assert values_of(translation, tmp_path)["data.min_tokens"] == 20


@pytest.mark.parametrize(
    ("tool", "added"), [("trl", "loss_type: dft"), ("llamafactory", "use_dft_loss: true")]
)
def test_dft_is_translated(tool: str, added: str, convert: Converter, tmp_path: Path) -> None:
    translation = convert(FILES[tool], added)
    assert left_out(translation) == {}
    assert values_of(translation, tmp_path)["train.dft"] is True


@pytest.mark.parametrize(
    ("tool", "added"), [("trl", "loss_type: dft"), ("llamafactory", "use_dft_loss: true")]
)
def test_label_smoothing_is_dropped_with_dft(
    tool: str, added: str, convert: Converter, tmp_path: Path
) -> None:
    translation = convert(FILES[tool], f"{added}\nlabel_smoothing_factor: 0.1\n")
    assert left_out(translation) == {}
    check_values(values_of(translation, tmp_path), {"train.dft": True, "train.label_smoothing": 0})
    [note] = [each for each in translation.remarks if each.key == "label_smoothing_factor"]
    assert note.text == f"{tool} ignores it with the loss of DFT"


@pytest.mark.parametrize(
    ("added", "trained"),
    [
        ("", ["*.-2.*", "*.-1.*"]),
        ("freeze_trainable_layers: -1", ["*.0.*"]),
        (
            "freeze_trainable_layers: 1\nfreeze_trainable_modules: mlp, self_attn\n"
            "freeze_extra_modules: lm_head",
            ["*.-1.mlp*", "*.-1.self_attn*", "*lm_head*"],
        ),
    ],
)
def test_freezing_of_llamafactory_is_translated(
    added: str, trained: list[str], convert: Converter, tmp_path: Path
) -> None:
    file = LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: freeze")
    lines = [line for line in file.splitlines() if not line.startswith("lora")]
    translation = convert("\n".join(lines) + "\n", added)
    assert left_out(translation) == {}
    values = {"adapter": None, "train.freeze": ["*"], "train.unfreeze": trained}
    check_values(values_of(translation, tmp_path), values)
