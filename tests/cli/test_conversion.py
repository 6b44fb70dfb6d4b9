"""Configurations of other tools that become experiments: values, origins, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonlaunch import config
from axonlaunch.cli.conversion.experiment_file import experiment_yaml
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.validation.other_tools.translate import TOOLS, convert_file
from axonlaunch.config.validation.other_tools.translation import Translation

AXOLOTL = """
base_model: org/base
datasets:
  - {path: org/prompts, type: alpaca, split: "train[:20%]"}
val_set_size: 0.1
sequence_len: 2048
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 4
learning_rate: 2e-4
lr_scheduler: cosine
warmup_ratio: 0.1
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
evals_per_epoch: 4
saves_per_epoch: 2
dataset_prepared_path: prepared
wandb_project: mine
wandb_watch:
"""
LLAMAFACTORY = """
model_name_or_path: org/Qwen3-4B
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
loraplus_lr_ratio: 16.0
dataset: answers, talks
dataset_dir: data
template: qwen3
cutoff_len: 1024
max_samples: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.05
eval_strategy: steps
eval_steps: 50
save_steps: 200
overwrite_output_dir: true
report_to: none
"""
TORCHTUNE = """
output_dir: /tmp/tuned
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: ${checkpointer.checkpoint_dir}/tokenizer.model
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 64
  lora_alpha: 128
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama
  output_dir: ${output_dir}
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: org/talks
  conversation_column: dialogue
  conversation_style: sharegpt
  train_on_input: false
  packed: true
  split: train
batch_size: 2
gradient_accumulation_steps: 8
epochs: 2
max_steps_per_epoch: 100
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: true}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 10
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
clip_grad_norm: null
dtype: bf16
enable_activation_checkpointing: true
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}"}
"""
TRL = """
model_name_or_path: org/base
model_revision: v2
torch_dtype: bfloat16
dataset_mixture:
  datasets:
    - {id: org/talks, config: default, split: train_sft, columns: [messages], weight: 1.0}
    - {id: org/more, config: code, split: train, columns: [messages], weight: 0.5}
  test_split_size: 1000
max_length: 8192
packing: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 2.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 50
max_steps: -1
num_train_epochs: 2
max_grad_norm: 0.2
bf16: true
eval_strategy: epoch
save_strategy: steps
save_steps: 0.05
save_total_limit: 1
push_to_hub: true
hub_model_id: org/tuned
report_to: [wandb]
seed: 7
"""
FILES = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "torchtune": TORCHTUNE, "trl": TRL}

Write = Callable[..., Translation]


@pytest.fixture
def converted(tmp_path: Path) -> Write:
    """Return a function that writes a file and translates it."""
    (tmp_path / "data").mkdir()
    columns = {"prompt": "question", "response": "answer"}
    tags = {"role_tag": "speaker", "content_tag": "said"}
    info = {
        "answers": {"hf_hub_url": "org/answers", "columns": columns},
        "talks": {"file_name": "talks.json", "columns": {"messages": "turns"}, "tags": tags},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))

    def convert(text: str, added: str = "", **options: Any) -> Translation:
        file = tmp_path / "other.yaml"
        file.write_text(text + added)
        return convert_file(file, **options)

    return convert


def loaded(translation: Translation, folder: Path) -> RunConfig:
    """Return the configuration that an experiment becomes."""
    file = folder / "experiment" / "other.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(experiment_yaml(translation, "other.yaml"))
    return config.load(["experiment=other"], config_dirs=[folder])


def flat(translation: Translation, folder: Path) -> dict[str, Any]:
    return config.flatten(loaded(translation, folder))


def left_out(translation: Translation) -> dict[str, str]:
    return {each.key: each.text for each in translation.remarks if each.kind == "left out"}


@pytest.mark.parametrize("tool", FILES)
def test_a_file_is_recognized_by_its_keys(tool: str, converted: Write) -> None:
    translation = converted(FILES[tool])
    assert translation.tool.name == tool
    assert [each for each in translation.remarks if each.kind != "note"] == []


def expect(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: values[key] for key in expected} == expected


def test_axolotl_becomes_an_experiment(converted: Write, tmp_path: Path) -> None:
    values = flat(converted(AXOLOTL, devices=4), tmp_path)
    expect(
        values,
        {
            "model.name": "hf",
            "model.path": "org/base",
            "adapter.rank": 32,
            "adapter.alpha": 16.0,
            "adapter.targets": "all-linear",
            "data.name": "chat",
            "data.files": ["org/prompts"],
            "data.split": "train[:20%]",
            "data.prompt_format": "alpaca",
            "data.sequence_length": 2048,
            "data.packing": "best_fit",
            "data.held_out": 0.1,
            "optimizer.name": "adamw",
            "optimizer.lr": 2e-4,
            "optimizer.weight_decay": 0.0,
            "scheduler.warmup_ratio": 0.1,
            "scheduler.final_lr_ratio": 0.0,
            "train.global_batch_size": 2 * 4 * 4,
            "train.micro_batch_size": 2,
            "train.epochs": 4.0,
            "train.steps": "auto",
            "train.precision": "auto",
            "train.activation_checkpointing": "full",
            "train.eval_every": "0.25 epoch",
            "checkpoint.every": "0.5 epoch",
        },
    )


def test_llamafactory_becomes_an_experiment(converted: Write, tmp_path: Path) -> None:
    values = flat(converted(LLAMAFACTORY), tmp_path)
    expect(
        values,
        {
            "model.path": "org/Qwen3-4B",
            "adapter.rank": 8,
            "adapter.alpha": 16.0,
            "adapter.targets": ["q_proj", "v_proj"],
            "data.chat_template": None,
            "data.limit": 500,
            "data.packing": "none",
            "data.sequence_length": 1024,
            "data.held_out": 0.05,
            "optimizer.lr": 1e-4,
            "train.global_batch_size": 8,
            "train.precision": "bf16",
            "train.param_dtype": "fp32",
            "train.activation_checkpointing": "full",
            "train.eval_every": 50,
            "checkpoint.every": 200,
            "checkpoint.overwrite": True,
        },
    )
    mix = loaded(converted(LLAMAFACTORY), tmp_path).data.mix  # type: ignore[attr-defined]
    assert mix["answers"]["fields"] == {"instruction": "question", "output": "answer"}
    assert mix["talks"]["files"] == [str(tmp_path / "data" / "talks.json")]
    assert mix["talks"]["fields"] == {"messages": "turns", "role": "speaker", "content": "said"}


def test_torchtune_becomes_an_experiment(converted: Write, tmp_path: Path) -> None:
    values = flat(converted(TORCHTUNE), tmp_path)
    mlp = ["gate_proj", "up_proj", "down_proj"]
    expect(
        values,
        {
            "run_dir": "/tmp/tuned",
            "model.path": "/models/llama",
            "adapter.targets": ["q_proj", "o_proj", *mlp],
            "adapter.rank": 64,
            "adapter.alpha": 128.0,
            "data.files": ["org/talks"],
            "data.train_on": "assistant",
            "data.packing": "best_fit",
            "data.sequence_length": 4096,
            "data.held_out": 0,
            "optimizer.lr": 3e-4,
            "optimizer.weight_decay": 0.01,
            "scheduler.name": "cosine",
            "scheduler.warmup_steps": 10,
            "train.steps": 200,
            "train.epochs": None,
            "train.global_batch_size": 16,
            "train.grad_clip": None,
            "train.precision": "bf16",
            "train.param_dtype": "bf16",
            "train.activation_checkpointing": "full",
            "checkpoint.every": "1 epoch",
        },
    )


def test_trl_becomes_an_experiment(converted: Write, tmp_path: Path) -> None:
    translation = converted(TRL)
    expect(
        flat(translation, tmp_path),
        {
            "model.revision": "v2",
            "adapter": None,
            "data.train_on": "all",
            "data.held_out": 1000,
            "data.packing": "best_fit",
            "data.sequence_length": 8192,
            "scheduler.final_lr_ratio": 0.1,
            "scheduler.warmup_steps": 50,
            "train.epochs": 2.0,
            "train.grad_clip": 0.2,
            "train.precision": "bf16",
            "train.param_dtype": "bf16",
            "train.eval_every": "1 epoch",
            "checkpoint.every": "0.1 epoch",
            "checkpoint.keep_last": 1,
            "checkpoint.push": "org/tuned",
            "seed": 7,
        },
    )
    mix = loaded(translation, tmp_path).data.mix  # type: ignore[attr-defined]
    assert mix["talks"] == {"files": ["org/talks"], "split": "train_sft"}
    assert mix["more"] == {
        "files": ["org/more"],
        "subset": "code",
        "split": "train",
        "epochs": 0.5,
    }


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
    tool: str, added: str, mode: str, converted: Write
) -> None:
    setting = converted(FILES[tool], added).settings["train.activation_checkpointing"]
    assert setting.value == mode


@pytest.mark.parametrize("value", [True, False])
def test_update_in_backward_of_torchtune_is_translated(value: bool, converted: Write) -> None:
    translation = converted(FILES["torchtune"], f"optimizer_in_bwd: {str(value).lower()}")
    assert translation.settings["train.optimizer_in_backward"].value is value


@pytest.mark.parametrize("tool", FILES)
def test_each_line_of_an_experiment_names_the_key_of_its_origin(
    tool: str, converted: Write
) -> None:
    translation = converted(FILES[tool])
    keys = {*translation.tool.keys, *translation.source, *translation.expressed}
    for line in experiment_yaml(translation, "other.yaml").splitlines()[2:]:
        value, _, origin = line.partition("  # ")
        if value.strip() and not value.endswith(":"):
            first = origin.split(";")[0].split(",")[0].strip()
            assert first in keys or first.startswith(f"default of {tool}"), line


@pytest.mark.parametrize(
    ("tool", "added", "key"),
    [
        ("axolotl", "rl: dpo", "rl"),
        ("axolotl", "neftune_noise_alpha: 5", "neftune_noise_alpha"),
        ("axolotl", "lr_scheduler: rex", "lr_scheduler"),
        ("llamafactory", "stage: dpo", "stage"),
        ("llamafactory", "quantization_bit: 3", "quantization_bit"),
        ("llamafactory", "use_galore: true", "use_galore"),
        ("llamafactory", "dataset: unlisted", "dataset"),
        ("llamafactory", "dataset: null", "dataset"),
        ("llamafactory", "template: mistral", "template"),
        ("torchtune", "kd_ratio: 0.5", "kd_ratio"),
        ("trl", "beta: 0.1", "beta"),
        ("trl", "lr_scheduler_type: polynomial", "lr_scheduler_type"),
        ("trl", "optim: schedule_free_adamw", "optim"),
    ],
)
def test_a_key_without_counterpart_is_left_out(
    tool: str, added: str, key: str, converted: Write
) -> None:
    translation = converted(FILES[tool], added)
    assert [*left_out(translation)] == [key]
    assert translation.changes_training


@pytest.mark.parametrize(
    ("tool", "added", "base"),
    [
        ("axolotl", "load_in_4bit: true\nadapter: qlora", "nf4"),
        ("axolotl", "load_in_8bit: true", "int8"),
        ("llamafactory", "quantization_bit: 4\nquantization_method: bitsandbytes", "nf4"),
        ("torchtune", "model: {_component_: torchtune.models.llama3_1.qlora_llama3_1_8b}", "nf4"),
        ("trl", "use_peft: true\nload_in_4bit: true", "nf4"),
    ],
)
def test_qlora_becomes_a_quantized_base(tool: str, added: str, base: str, converted: Write) -> None:
    translation = converted(FILES[tool], added)
    assert translation.settings["adapter.base"].value == base
    assert not translation.changes_training


@pytest.mark.parametrize(
    ("tool", "added"),
    [
        ("axolotl", "expert_parallel_size: 4"),
        ("llamafactory", "expert_model_parallel_size: 4"),
    ],
)
def test_an_expert_degree_becomes_fsdp_with_divided_experts(
    tool: str, added: str, converted: Write
) -> None:
    translation = converted(FILES[tool], added)
    assert translation.options["strategy"].value == "fsdp"
    assert translation.settings["strategy.expert.degree"].value == 4
    assert "strategy" not in converted(FILES[tool], f"{added[:-1]}1").options


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
    tool: str, added: str, key: str, converted: Write
) -> None:
    translation = converted(FILES[tool], added)
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


def test_a_quantized_base_without_adapter_is_left_out(converted: Write) -> None:
    translation = converted(FILES["trl"], "use_peft: false\nload_in_4bit: true")
    assert [*left_out(translation)] == ["load_in_4bit"]


@pytest.mark.parametrize(
    ("tool", "added"),
    [
        ("axolotl", "load_in_4bit: false\nrl:\nneftune_noise_alpha: null"),
        ("axolotl", "liger_rms_norm: true\nflash_attention: true\nhub_strategy: end"),
        ("llamafactory", "preprocessing_num_workers: 16\nplot_loss: true"),
        ("torchtune", "profiler: {enabled: false, cpu: true}\nlog_level: INFO"),
        ("trl", "hub_strategy: every_save\ndataset_num_proc: 8\nload_in_4bit: false"),
    ],
)
def test_keys_that_change_nothing_are_not_reported(tool: str, added: str, converted: Write) -> None:
    translation = converted(FILES[tool], added)
    assert not translation.changes_training
    assert translation.not_needed


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
    added: str, targets: list[str], converted: Write, tmp_path: Path
) -> None:
    translation = converted(AXOLOTL.replace("lora_target_linear: true", added))
    assert not translation.changes_training
    assert flat(translation, tmp_path)["adapter.targets"] == targets


def test_an_unknown_key_is_reported_with_a_similar_one(converted: Write) -> None:
    (remark,) = (
        each
        for each in converted(AXOLOTL, "context_parapllel_size: 2").remarks
        if each.kind == "unknown"
    )
    assert remark.setting == "context_parapllel_size=2"
    assert remark.text == ("is no known key of axolotl; did you mean context_parallel_size?")


def test_prompts_that_a_file_writes_out_become_a_prompt_format(converted: Write) -> None:
    kind = {
        "field_instruction": "question",
        "field_input": "context",
        "field_output": "reply",
        "format": "Q: {instruction}\n{input}\nA:",
        "no_input_format": "Q: {instruction}\nA:",
    }
    datasets = [{"path": "rows.jsonl", "type": kind}]
    translation = converted(yaml.safe_dump({"base_model": "org/base", "datasets": datasets}))
    chosen = translation.settings["data.prompt_format"].value
    assert chosen == (
        "{% if context is defined and context %}Q: {{ question }}\n{{ context }}\nA:"
        "{% else %}Q: {{ question }}\nA:{% endif %}"
    )
    assert translation.settings["data.fields"].value == {"completion": "reply"}


def test_special_and_added_tokens_are_those_of_the_tokenizer(
    converted: Write, tmp_path: Path
) -> None:
    added = "special_tokens: {eos_token: <|end|>, pad_token: <pad>}\ntokens: [<tool>]"
    expect(
        flat(converted(AXOLOTL, added), tmp_path),
        {
            "tokenizer.special.eos": "<|end|>",
            "tokenizer.special.pad": "<pad>",
            "tokenizer.add_tokens": ["<tool>"],
        },
    )
    values = flat(converted(TRL, "eos_token: <|end|>"), tmp_path)
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
    added: str, saved: object, evaluated: object, converted: Write, tmp_path: Path
) -> None:
    lines = [line for line in AXOLOTL.splitlines() if "per_epoch" not in line]
    values = flat(converted("\n".join(lines), f"\n{added}"), tmp_path)
    assert values["checkpoint.every"] == saved
    assert values["train.eval_every"] == evaluated


def test_unfrozen_parameters_become_patterns(converted: Write) -> None:
    written = ["^lm_head.weight$", r"model.layers.4[4-9]+.gate", r"model\.layers\.\d+\.norm.*"]
    written.append("^model.language_model.*")
    adapted = converted(AXOLOTL, yaml.safe_dump({"unfrozen_parameters": written}))
    assert "train.freeze" not in adapted.settings
    full = AXOLOTL.replace("adapter: lora", "")
    translation = converted(full, yaml.safe_dump({"unfrozen_parameters": written}))
    assert translation.settings["train.freeze"].value == ["*"]
    patterns = ["lm_head.weight", "model.layers.4[4-9].gate*", "model.layers.*.norm**", "model.**"]
    assert translation.settings["train.unfreeze"].value == patterns
    (remark,) = (
        each
        for each in converted(full, "unfrozen_parameters: ['(a|b).weight']").remarks
        if each.kind == "left out"
    )
    assert remark.text == "write (a|b).weight as a pattern in train.unfreeze"


def test_layouts_divide_the_batch_of_all_devices(converted: Write, tmp_path: Path) -> None:
    added = "tensor_parallel_size: 2\ndp_shard_size: 4"
    values = flat(converted(AXOLOTL, added, devices=8), tmp_path)
    assert values["strategy.tensor.degree"] == 2
    assert values["strategy.data_parallel"] == "fsdp"
    assert values["train.global_batch_size"] == 2 * 4 * 4  # four ranks have different samples


def test_text_with_an_interpolation_stays_text(converted: Write, tmp_path: Path) -> None:
    template = "{% for m in messages %}${price}{{ m['content'] }}{% endfor %}"
    translation = converted(TRL, yaml.safe_dump({"chat_template": template}))
    assert flat(translation, tmp_path)["data.chat_template"] == template


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "is not YAML in line 1; write a YAML file"),
        ("", "is empty, not keys with values; write the file of a training run"),
        ("[1, 2]", "contains a list, not keys with values; write the file of a training run"),
        (
            "base_model: &a [*a]",
            "has more than 100,000 values, or contains itself; write the file of a training run",
        ),
        (
            "steps: 3",
            "has the keys of no known tool; write --from axolotl, llamafactory, llamafactory-v1, "
            "torchtune or trl",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    text: str, reason: str, converted: Write, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        converted(text)
    assert str(refused.value) == f"{tmp_path / 'other.yaml'}: {reason}"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        convert_file(tmp_path / "none.yaml")


@pytest.mark.parametrize("tool", TOOLS)
def test_values_of_wrong_types_are_no_traceback(tool: str, converted: Write) -> None:
    """Each known key is set to values that no tool would accept."""
    for value in ("odd", -1, float("inf"), [1], {"odd": 1}, [{"odd": 1}]):
        document: dict[str, Any] = {}
        for key in TOOLS[tool].keys:
            *groups, last = key.replace("*", "odd").split(".")
            node: Any = document
            for group in groups:
                node = node.setdefault(group, {}) if isinstance(node, dict) else {}
            if isinstance(node, dict) and last not in node:
                node[last] = value
        experiment_yaml(converted(yaml.safe_dump(document), tool=tool), "other.yaml")


@pytest.mark.parametrize(
    ("tool", "added", "exclude"),
    [
        (
            "torchtune",
            "quantizer:\n  _component_: torchtune.training.quantization."
            "Int8DynActInt4WeightQATQuantizer\n  groupsize: 64\nfake_quant_after_n_steps: 9\n",
            ["k_proj", "v_proj"],  # not adapted
        ),
        (
            "axolotl",
            "qat: {activation_dtype: int8, weight_dtype: int4, group_size: 64, "
            "fake_quant_after_n_steps: 9}\n",
            [],
        ),
    ],
)
def test_quantization_aware_training_of_torchao_is_translated(
    tool: str, added: str, exclude: list[str], converted: Write, tmp_path: Path
) -> None:
    translation = converted(FILES[tool], added)
    assert left_out(translation) == {}
    expect(
        flat(translation, tmp_path),
        {
            "train.matmul_dtype": "qat_int8_int4",
            "train.matmul_group_size": 64,
            "train.matmul_start_step": 9,
            "train.matmul_exclude": exclude,
        },
    )


@pytest.mark.parametrize(
    ("tool", "added", "key"),
    [
        ("torchtune", "quantizer: {_component_: a.Int4WeightOnlyQATQuantizer}", "_component_"),
        ("axolotl", "qat: {weight_dtype: nvfp4, group_size: 16}", "weight_dtype"),
        ("axolotl", "qat: {activation_dtype: int8, group_size: 16}", "activation_dtype"),
        ("axolotl", "qat: {quantize_embedding: false}", "qat"),
        ("axolotl", "qat: {fake_quant_after_n_steps: 9}", "qat"),
    ],
)
def test_other_types_of_quantization_are_left_out(
    tool: str, added: str, key: str, converted: Write
) -> None:
    [(left, text)] = left_out(converted(FILES[tool], added)).items()
    assert left.rpartition(".")[2] == key
    assert "only int8 inputs with int4 weights are rounded in training" in text


def test_quantization_that_differs_from_the_other_tool_is_noted(converted: Write) -> None:
    """torchtune rounds an adapted head; axolotl trains with asymmetric scales of weights."""

    def texts(document: str, added: str) -> str:
        return " ".join(each.text for each in converted(document, added).remarks)

    quantizer = "quantizer: {_component_: a.Int8DynActInt4WeightQATQuantizer}\n"
    adapted = TORCHTUNE.replace("model:\n", "model:\n  apply_lora_to_output: true\n", 1)
    assert "the head is not rounded here" not in texts(TORCHTUNE, quantizer)
    assert "the head is not rounded here" in texts(adapted, quantizer)
    types = "qat: {activation_dtype: int8, weight_dtype: int4}\n"
    assert "axolotl trains with asymmetric ones" in texts(AXOLOTL, types)


def test_shortest_rows_of_axolotl_are_translated(converted: Write, tmp_path: Path) -> None:
    translation = converted(AXOLOTL, "min_sample_len: 20\n")
    assert left_out(translation) == {}
    assert flat(translation, tmp_path)["data.min_tokens"] == 20


@pytest.mark.parametrize(
    ("tool", "added"), [("trl", "loss_type: dft"), ("llamafactory", "use_dft_loss: true")]
)
def test_dft_is_translated(tool: str, added: str, converted: Write, tmp_path: Path) -> None:
    translation = converted(FILES[tool], added)
    assert left_out(translation) == {}
    assert flat(translation, tmp_path)["train.dft"] is True


@pytest.mark.parametrize(
    ("tool", "added"), [("trl", "loss_type: dft"), ("llamafactory", "use_dft_loss: true")]
)
def test_label_smoothing_is_dropped_with_dft(
    tool: str, added: str, converted: Write, tmp_path: Path
) -> None:
    translation = converted(FILES[tool], f"{added}\nlabel_smoothing_factor: 0.1\n")
    assert left_out(translation) == {}
    expect(flat(translation, tmp_path), {"train.dft": True, "train.label_smoothing": 0})
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
    added: str, trained: list[str], converted: Write, tmp_path: Path
) -> None:
    file = LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: freeze")
    lines = [line for line in file.splitlines() if not line.startswith("lora")]
    translation = converted("\n".join(lines) + "\n", added)
    assert left_out(translation) == {}
    values = {"adapter": None, "train.freeze": ["*"], "train.unfreeze": trained}
    expect(flat(translation, tmp_path), values)
