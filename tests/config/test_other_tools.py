"""Keys of other tools are answered with the keys here, for each tool whose files are converted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import axonlaunch
from axonlaunch.config.problems.other_names import FOREIGN_NAMES
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.validation.other_tools.counterparts import counterpart_of
from axonlaunch.config.validation.other_tools.translate import TOOLS
from axonlaunch.config.validation.validate import validate

ODD: list[Any] = ["no such value", 2.5, [[]], {"a": {"b": float("nan")}}]
KEYS = [(tool.name, key) for tool in TOOLS.values() for key in tool.keys if "*" not in key]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("value", ODD, ids=str)
def test_every_key_of_a_tool_is_answered_whatever_its_value(tool: str, value: Any) -> None:
    for key in (key for name, key in KEYS if name == tool):
        text = counterpart_of(key, value)
        assert text is None or (text and "\n" not in text)


@pytest.mark.slow
def test_settings_in_answers_are_keys_of_the_configuration() -> None:
    """An answer that names a key here that does not exist would send users in circles."""
    options = {"model": "hf", "adapter": "lora", "data": "chat"}
    groups = {**{name: {"name": option} for name, option in options.items()}, "train": {"steps": 1}}
    unknown = []
    for _, key in KEYS:
        text = counterpart_of(key, 1) or ""
        for word in text.split(";")[0].removeprefix("write ").split():
            name, given, _ = word.strip("'").partition("=")
            if not text.startswith("write ") or not given or name in {*options, "strategy"}:
                continue
            tree: dict[str, Any] = {group: dict(values) for group, values in groups.items()}
            *parents, last = name.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = None
            messages = [problem.message for problem in validate(tree, RunConfig).problems]
            unknown += [name for message in messages if message.startswith("there is no such key;")]
    assert not unknown


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("deepspeed", "ds.json", "write strategy=zero1, zero2 or fsdp"),
        ("deepspeed", True, "write strategy=zero1, zero2 or fsdp"),
        ("deepspeed", "zero3.json", "write strategy=fsdp"),
        ("datasets", "x", "did you mean data=chat or data=documents with data.files?"),
        ("stage", "sft", "write data=chat"),
        ("stage", "pt", "write data=documents"),
        ("stage", "dpo", "losses for preferences"),
        ("fsdp_config", "x", "did you mean strategy.fsdp?"),
        ("num_processes", 16, "did you mean launch.nproc, the ranks of one node?"),
        ("limit_val_batches", 8, "did you mean train.eval_batches, in global batches?"),
    ],
)
def test_value_of_another_tools_key_decides_the_answer(key: str, value: Any, expected: str) -> None:
    [problem] = validate({key: value}, RunConfig).problems
    assert expected in problem.message


def rows() -> list[tuple[str, str]]:
    """Return the settings on the page for users of other tools, and what it says to write."""
    page = (Path(axonlaunch.__file__).parent / "docs" / "coming-from.md").read_text()
    return re.findall(r"^\| `([\w.]+=[^`]+)` \| `([^`]+)` \|$", page, flags=re.MULTILINE)


def test_page_for_users_of_other_tools_says_what_errors_say() -> None:
    assert len(rows()) > 50
    for setting, expected in rows():
        key, _, value = setting.partition("=")
        tree: Any = yaml.safe_load(value)
        for name in reversed(key.split(".")):
            tree = {name: tree}
        [problem] = validate(tree, RunConfig).problems
        complete = rf"{re.escape(expected)}(?=[ ?]|$)"
        message = problem.message.replace("'", "")
        assert re.search(complete, message), (setting, message)


def test_names_of_converted_tools_are_in_one_table() -> None:
    """Only keys that other tools have with another meaning are in both."""
    exact = {key for tool in TOOLS.values() for key in tool.keys}
    assert FOREIGN_NAMES.keys() & exact == {
        "batch_size",
        "bnb_4bit_quant_type",
        "dataset",
        "datasets",
        "mixed_precision",
    }
