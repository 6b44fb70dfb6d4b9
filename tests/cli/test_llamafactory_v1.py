"""Configurations of LLaMA-Factory's second format, which names ``model`` and ``train_dataset``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from axonlaunch import config
from axonlaunch.cli.conversion.experiment_file import experiment_yaml
from axonlaunch.config.validation.other_tools.translate import convert_file
from axonlaunch.config.validation.other_tools.translation import Translation

FILE: dict[str, Any] = {
    "model": "Qwen/Qwen3-4B",
    "model_class": "llm",
    "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all"},
    "kernel_config": {"name": "auto"},
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "train_dataset": "data/rows.yaml",
    "output_dir": "./outputs/test_lora",
    "micro_batch_size": 2,
    "cutoff_len": 1024,
    "learning_rate": 1e-4,
    "max_steps": 10,
    "sample_backend": "hf",
}
ROWS = {
    "identity": {"path": "data/identity.json", "source": "local", "converter": "alpaca"},
    "talks": {"path": "org/talks", "split": "train_sft", "converter": "sharegpt", "size": 500},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in which a file may be, below the tool's folder with the data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.yaml").write_text(yaml.safe_dump(ROWS))
    inner = tmp_path / "examples" / "train_lora"
    inner.mkdir(parents=True)
    return inner


def converted(folder: Path, tool: str | None = None, **changed: Any) -> Translation:
    written = {key: value for key, value in {**FILE, **changed}.items() if value is not None}
    (folder / "lora.yaml").write_text(yaml.safe_dump(written))
    return convert_file(folder / "lora.yaml", tool=tool, devices=4)


def values_of(translation: Translation, folder: Path) -> dict[str, Any]:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "lora.yaml").write_text(experiment_yaml(translation, "lora.yaml"))
    return config.flatten(config.load(["experiment=lora"], config_dirs=[folder]))


def left_out(translation: Translation) -> list[str]:
    return [each.key for each in translation.remarks if each.kind != "note"]


def test_second_format_of_llamafactory_becomes_an_experiment(folder: Path) -> None:
    translation = converted(folder)
    assert [each.text for each in translation.remarks] == [
        "size takes the first rows; LLaMA-Factory draws them at random"
    ]
    values = values_of(translation, folder)
    expected = {
        "model.path": "Qwen/Qwen3-4B",
        "adapter.rank": 16,
        "adapter.alpha": 32.0,
        "adapter.dropout": 0.05,
        "adapter.targets": "all-linear",
        "strategy.data_parallel": "fsdp",
        "data.sequence_length": 1024,
        "data.packing": "none",
        "data.mix.identity.files": [str(folder.parents[1] / "data" / "identity.json")],
        "data.mix.talks.files": ["org/talks"],
        "data.mix.talks.split": "train_sft",
        "data.mix.talks.limit": 500,
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.01,
        "scheduler.name": "constant",
        "train.global_batch_size": 8,
        "train.micro_batch_size": 2,
        "train.steps": 10,
        "train.precision": "bf16",
        "train.param_dtype": "bf16",
        "train.activation_checkpointing": "full",
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("tool", [None, "llamafactory", "llamafactory-v1"])
def test_second_format_is_recognized_by_its_keys(tool: str | None, folder: Path) -> None:
    assert converted(folder, tool).tool.name == "llamafactory-v1"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"optim_config": {"name": "muon", "wd": 0.2, "adamw_betas": [0.8, 0.9]}},
            {
                "optimizer.name": "muon",
                "optimizer.lr": 1e-4,
                "optimizer.weight_decay": 0.2,
                "optimizer.adamw_betas": [0.8, 0.9],
            },
        ),
        (
            {"quant_config": {"name": "bnb", "quantization_bit": 8}},
            {"adapter.base": "int8"},
        ),
        ({"quant_config": {"name": "bnb"}}, {"adapter.base": "nf4"}),
        ({"batching_strategy": "dynamic_padding_free"}, {"data.packing": "best_fit"}),
        (
            {"dist_config": {"name": "fsdpturbo", "ep_size": 2}, "global_batch_size": 64},
            {"strategy.expert.degree": 2, "train.global_batch_size": 64},
        ),
        (
            {"cp_size": 2, "max_steps": None, "save_epochs": 0.5},
            {
                "strategy.context.degree": 2,
                "train.global_batch_size": 4,
                "train.epochs": 3.0,
                "checkpoint.every": "0.5 epoch",
            },
        ),
        (
            {"dist_config": {"name": "deepspeed", "config_file": "ds_z2_config.json"}},
            {"strategy.fsdp.sharding": "shard_grad_op"},
        ),
        (
            {"train_dataset": "org/talks", "eval_dataset": "more.jsonl"},
            {"data.files": ["org/talks"], "data.held_out.files": ["more.jsonl"]},
        ),
    ],
)
def test_plugins_of_second_format_become_options(
    changed: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    translation = converted(folder, **changed)
    assert left_out(translation) == []
    values = values_of(translation, folder)
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"peft_config": {"name": "oft"}}, "peft_config.name"),
        ({"quant_config": {"name": "bnb", "quantization_bit": 3}}, "quant_config.quantization_bit"),
        ({"optim_config": {"name": "adam_mini"}}, "optim_config.name"),
        ({"train_dataset": "data/none.yaml"}, "train_dataset"),
        ({"train_dataset": None}, "train_dataset"),
        ({"model_class": "cls"}, "model_class"),
        ({"pref_beta": 0.1}, "pref_beta"),
    ],
)
def test_keys_of_second_format_without_counterpart_are_left_out(
    changed: dict[str, Any], key: str, folder: Path
) -> None:
    assert left_out(converted(folder, **changed)) == [key]


def test_pairs_of_answers_are_left_out_of_second_format(folder: Path) -> None:
    pairs = {"pairs": {"path": "org/pairs", "converter": "pair"}}
    (folder.parents[1] / "data" / "rows.yaml").write_text(yaml.safe_dump(pairs))
    assert left_out(converted(folder)) == ["train_dataset"]
