"""Keys of other tools that are left out or unknown, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.other_tools import AXOLOTL, FILES, Converter, left_out

from axonlaunch.cli.conversion.experiment_file import experiment_yaml
from axonlaunch.config import ConfigError
from axonlaunch.config.validation.other_tools.translate import TOOLS, convert_file


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
    tool: str, added: str, key: str, convert: Converter
) -> None:
    translation = convert(FILES[tool], added)
    assert [*left_out(translation)] == [key]
    assert translation.changes_training


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
def test_keys_that_change_nothing_are_not_reported(
    tool: str, added: str, convert: Converter
) -> None:
    translation = convert(FILES[tool], added)
    assert not translation.changes_training
    assert translation.not_needed


def test_an_unknown_key_is_reported_with_a_similar_one(convert: Converter) -> None:
    (remark,) = (
        each
        for each in convert(AXOLOTL, "context_parapllel_size: 2").remarks
        if each.kind == "unknown"
    )
    assert remark.setting == "context_parapllel_size=2"
    assert remark.text == ("is no known key of axolotl; did you mean context_parallel_size?")


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
    text: str, reason: str, convert: Converter, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        convert(text)
    assert str(refused.value) == f"{tmp_path / 'other.yaml'}: {reason}"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        convert_file(tmp_path / "none.yaml")


@pytest.mark.parametrize("tool", TOOLS)
def test_values_of_wrong_types_are_no_traceback(tool: str, convert: Converter) -> None:
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
        experiment_yaml(convert(yaml.safe_dump(document), tool=tool), "other.yaml")
