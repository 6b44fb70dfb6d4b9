"""Configuration files of other tools, and the experiments that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axonlaunch import config
from axonlaunch.cli.conversion.experiment_file import experiment_yaml
from axonlaunch.config import RunConfig
from axonlaunch.config.validation.other_tools.translate import convert_file
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


class Converter:
    """Writes a file, and the data sets of LLaMA-Factory beside it, and translates the file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "other.yaml"
        (folder / "data").mkdir()
        columns = {"prompt": "question", "response": "answer"}
        tags = {"role_tag": "speaker", "content_tag": "said"}
        info = {
            "answers": {"hf_hub_url": "org/answers", "columns": columns},
            "talks": {"file_name": "talks.json", "columns": {"messages": "turns"}, "tags": tags},
        }
        (folder / "data" / "dataset_info.json").write_text(json.dumps(info))

    def __call__(self, text: str, added: str = "", **options: Any) -> Translation:
        self.file.write_text(text + added)
        return convert_file(self.file, **options)


def experiment_of(translation: Translation, folder: Path) -> RunConfig:
    """Return the configuration that an experiment becomes."""
    file = folder / "experiment" / "other.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(experiment_yaml(translation, "other.yaml"))
    return config.load(["experiment=other"], config_dirs=[folder])


def values_of(translation: Translation, folder: Path) -> dict[str, Any]:
    return config.flatten(experiment_of(translation, folder))


def left_out(translation: Translation) -> dict[str, str]:
    return {each.key: each.text for each in translation.remarks if each.kind == "left out"}


def check_values(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: values[key] for key in expected} == expected
