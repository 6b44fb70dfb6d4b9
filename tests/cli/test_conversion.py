"""Configurations of other tools become experiments: values, and the keys they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.other_tools import (
    AXOLOTL,
    FILES,
    LLAMAFACTORY,
    TORCHTUNE,
    TRL,
    Converter,
    check_values,
    experiment_of,
    values_of,
)

from axonlaunch.cli.conversion.experiment_file import experiment_yaml


@pytest.mark.parametrize("tool", FILES)
def test_a_file_is_recognized_by_its_keys(tool: str, convert: Converter) -> None:
    translation = convert(FILES[tool])
    assert translation.tool.name == tool
    assert [each for each in translation.remarks if each.kind != "note"] == []


def test_axolotl_becomes_an_experiment(convert: Converter, tmp_path: Path) -> None:
    values = values_of(convert(AXOLOTL, devices=4), tmp_path)
    check_values(
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


def test_llamafactory_becomes_an_experiment(convert: Converter, tmp_path: Path) -> None:
    values = values_of(convert(LLAMAFACTORY), tmp_path)
    check_values(
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
    mix = experiment_of(convert(LLAMAFACTORY), tmp_path).data.mix  # type: ignore[attr-defined]
    assert mix["answers"]["fields"] == {"instruction": "question", "output": "answer"}
    assert mix["talks"]["files"] == [str(tmp_path / "data" / "talks.json")]
    assert mix["talks"]["fields"] == {"messages": "turns", "role": "speaker", "content": "said"}


def test_torchtune_becomes_an_experiment(convert: Converter, tmp_path: Path) -> None:
    values = values_of(convert(TORCHTUNE), tmp_path)
    mlp = ["gate_proj", "up_proj", "down_proj"]
    check_values(
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


def test_trl_becomes_an_experiment(convert: Converter, tmp_path: Path) -> None:
    translation = convert(TRL)
    check_values(
        values_of(translation, tmp_path),
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
    mix = experiment_of(translation, tmp_path).data.mix  # type: ignore[attr-defined]
    assert mix["talks"] == {"files": ["org/talks"], "split": "train_sft"}
    assert mix["more"] == {
        "files": ["org/more"],
        "subset": "code",
        "split": "train",
        "epochs": 0.5,
    }


@pytest.mark.parametrize("tool", FILES)
def test_each_line_of_an_experiment_names_the_key_of_its_origin(
    tool: str, convert: Converter
) -> None:
    translation = convert(FILES[tool])
    keys = {*translation.tool.keys, *translation.source, *translation.expressed}
    for line in experiment_yaml(translation, "other.yaml").splitlines()[2:]:
        value, _, origin = line.partition("  # ")
        if value.strip() and not value.endswith(":"):
            first = origin.split(";")[0].split(",")[0].strip()
            assert first in keys or first.startswith(f"default of {tool}"), line


def test_layouts_divide_the_batch_of_all_devices(convert: Converter, tmp_path: Path) -> None:
    added = "tensor_parallel_size: 2\ndp_shard_size: 4"
    values = values_of(convert(AXOLOTL, added, devices=8), tmp_path)
    assert values["strategy.tensor.degree"] == 2
    assert values["strategy.data_parallel"] == "fsdp"
    assert values["train.global_batch_size"] == 2 * 4 * 4  # four ranks have different samples


def test_text_with_an_interpolation_stays_text(convert: Converter, tmp_path: Path) -> None:
    template = "{% for m in messages %}${price}{{ m['content'] }}{% endfor %}"
    translation = convert(TRL, yaml.safe_dump({"chat_template": template}))
    assert values_of(translation, tmp_path)["data.chat_template"] == template
