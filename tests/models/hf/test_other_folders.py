"""A folder given as a model that is an adapter, a run or a checkpoint is named, with the keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.configured import run_config

from axonlaunch.config import ConfigError
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.hf.architecture import architecture
from axonlaunch.models.hf.reading.files import read_config


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read_config(HuggingFaceConfig(path=str(folder)))
    [problem] = raised.value.problems
    assert problem.key == "model.path"
    return problem.message


@pytest.mark.parametrize(
    ("content", "base"),
    [
        ('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}', "Qwen/Qwen3-0.6B"),
        ('{"base_model_name_or_path": "my models/a"}', "'my models/a'"),
        ('{"base_model_name_or_path": null}', "BASE"),
        ("[]", "BASE"),
        ("not JSON", "BASE"),
    ],
)
def test_adapter_folder_given_as_model_is_answered_with_base_and_adapter_path(
    tmp_path: Path, content: str, base: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    expected = f"write model.path={base} adapter=lora adapter.path={tmp_path}"
    assert refused(tmp_path) == f"is an adapter, not a model; {expected}"


@pytest.mark.parametrize("inside", ["", "checkpoints/step_4"])
def test_run_folder_given_as_model_is_answered_with_weights_and_export(
    tmp_path: Path, inside: str
) -> None:
    folder = tmp_path / inside
    folder.mkdir(parents=True, exist_ok=True)
    for content, base in (("", "BASE"), ("{path: a/b}", "a/b")):
        (tmp_path / "config.yaml").write_text(f"adapter: null\nmodel: {content}\n")
        assert refused(folder) == (
            f"is a run, not a model; write model.path={base} model.weights={folder}, "
            f"or model.path=FOLDER after axonlaunch checkpoint export {folder} FOLDER"
        )
    run = {"adapter": {"name": "lora"}, "model": {"name": "hf", "path": "Qwen/Qwen3-0.6B"}}
    (tmp_path / "config.yaml").write_text(json.dumps(run))
    assert refused(folder) == (
        "is an adapter, not a model; write model.path=Qwen/Qwen3-0.6B adapter=lora "
        "adapter.path=FOLDER, "
        f"after axonlaunch checkpoint export {folder} FOLDER"
    )


def test_run_of_a_registered_model_given_as_model_is_answered_with_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: mine}\n")
    assert refused(tmp_path) == (
        "is a run of model=mine, which is not a model of transformers; write model=mine "
        f"model.weights={tmp_path}, with the sizes and the plugins of its run"
    )


def test_export_of_a_registered_model_given_as_model_is_answered_with_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"name": "mine", "axonlaunch": {"data": "text"}}')
    with pytest.raises(ConfigError, match=f"is an export of model=mine.* model.weights={tmp_path}"):
        architecture(HuggingFaceConfig(path=str(tmp_path)))


def test_other_folder_given_as_model_lacks_config_json(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith("has no config.json; give the folder of a model")


def test_run_folder_given_as_model_is_one_error_although_it_has_no_tokenizer_either(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text("adapter: null\n")
    data = ["data=chat", f"data.files={tmp_path}/rows.jsonl", "data.sequence_length=16"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ConfigError) as raised:
        run_config(["model=hf", f"model.path={tmp_path}", *data, "strategy=single"])
    assert [problem.key for problem in raised.value.problems] == ["model.path"]
