"""Rows of converted files: prompts, names of templates and of roles, and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from axonlaunch.config.validation.other_tools.translate import convert_file
from axonlaunch.config.validation.other_tools.translation import Translation

BELOW = "Below is an instruction that describes a task"
MORE = f"{BELOW}, paired with an input that provides further context"
WRITE = "Write a response that appropriately completes the request."
PROMPTS = {
    ("alpaca:chat", ""): f"SYSTEM: {BELOW}. {WRITE}\nUSER: Add.\nASSISTANT:",
    ("alpaca:chat", "1"): f"SYSTEM: {MORE}. {WRITE}\nUSER: Add.\n1\nASSISTANT:",
    (
        "alpaca:phi",
        "",
    ): f"<|system|>\n{BELOW}. {WRITE}<|end|>\n<|user|>\nAdd.<|end|>\n<|assistant|>\n",
    ("alpaca:phi", "1"): f"<|system|>\n{MORE}. {WRITE}<|end|>\n<|user|>\nAdd.<|end|>1<|assistant|>",
    ("alpaca:chatml", "1"): (
        f"<|im_start|>system\n{MORE}. {WRITE}<|im_end|>\n<|im_start|>user\nAdd.\n1<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
}
"""Prompts that ``AlpacaPrompter`` of axolotl writes, by the type of rows and the input."""


def converted(folder: Path, **keys: Any) -> Translation:
    (folder / "other.yaml").write_text(yaml.safe_dump(keys))
    return convert_file(folder / "other.yaml")


@pytest.mark.parametrize(("kind", "given"), PROMPTS)
def test_styles_of_alpaca_are_prompt_formats(kind: str, given: str, tmp_path: Path) -> None:
    datasets = [{"path": "rows.jsonl", "type": kind}]
    translation = converted(tmp_path, base_model="org/base", datasets=datasets)
    text = translation.settings["data.prompt_format"].value
    template = jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    row = {"instruction": "Add.", **({"input": given} if given else {})}
    assert template.render(row) == PROMPTS[kind, given]


@pytest.mark.parametrize(
    ("template", "model", "leaves_out"),
    [
        ("deepseek3", "deepseek-ai/DeepSeek-V3-0324", False),
        ("qwen3_nothink", "Qwen/Qwen3-4B", False),
        ("deepseek3", "Qwen/Qwen3-4B", True),
        ("llama2", "meta-llama/Llama-3.1-8B", True),
        ("gemma3", "google/gemma-2-2b", True),
    ],
)
def test_template_of_the_models_family_is_that_of_its_tokenizer(
    template: str, model: str, leaves_out: bool, tmp_path: Path
) -> None:
    translation = converted(tmp_path, model_name_or_path=model, stage="sft", template=template)
    assert ("template" in [each.key for each in translation.remarks]) is leaves_out


@pytest.mark.parametrize(
    ("roles", "fields"),
    [
        (
            {"user": ["human", "customer"], "assistant": ["agent"]},
            {"user": "customer", "assistant": "agent"},
        ),
        ({"user": ["human"], "assistant": ["gpt"]}, {}),
    ],
)
def test_other_names_of_roles_are_fields(
    roles: dict[str, list[str]], fields: dict[str, str], tmp_path: Path
) -> None:
    datasets = [{"path": "rows.jsonl", "type": "chat_template", "roles": roles}]
    translation = converted(tmp_path, base_model="org/base", datasets=datasets)
    written = translation.settings.get("data.fields")
    assert (written.value if written else {}) == fields


def test_order_of_the_files_is_kept(tmp_path: Path) -> None:
    keys = {"base_model": "org/base", "sample_packing": True, "curriculum_sampling": True}
    datasets = [{"path": "rows.jsonl", "type": "alpaca"}]
    translation = converted(tmp_path, datasets=datasets, **keys)
    assert translation.settings["data.shuffle"].value == "none"
    assert translation.settings["data.packing"].value == "concat"
    assert not translation.changes_training
    both = [*datasets, {"path": "more.jsonl", "type": "alpaca"}]
    mixed = converted(tmp_path, datasets=both, **keys)
    assert [each.key for each in mixed.remarks if each.kind == "left out"] == [
        "curriculum_sampling"
    ]
