"""Chats with other columns, per-message flags, and rows that are made for other losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import chat_templates, corpus

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import ChatConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.datasets.dataset import IGNORE_INDEX
from axonlaunch.data.texts.chats.chat_rows import chat_columns

pytest.importorskip("transformers")

ASKED, SAID = {"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"}
MORE = [{"role": "user", "content": "And 4?"}, {"role": "assistant", "content": "That is 7."}]
CHAT = [ASKED, SAID, *MORE]
Read = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return the text of each chat, and its counted text."""

    def make(rows: list[Any], template: str = "CHATML", **keys: Any) -> list[tuple[str, str]]:
        text = getattr(chat_templates, template)
        folder = corpus.save_tokenizer(tmp_path / template, chat_template=text)
        file = corpus.write_jsonl(tmp_path / "chats.jsonl", rows)
        arguments = {"sequence_length": 256, "packing": "none", "held_out": 0, **keys}
        config = ChatConfig(files=[str(file)], cache_dir=str(tmp_path / "cache"), **arguments)
        dataset: Any = build_dataset(config, TokenizerConfig(path=str(folder)))
        batch = dataset.samples(range(dataset.num_samples), split="train")
        texts = []
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            counted = targets[targets != IGNORE_INDEX].tolist()
            texts.append((dataset.decode(inputs.tolist()), dataset.decode(counted)))
        return texts

    return make


FIELDS = {
    "prompt and completion": (
        {"q": "Add 1 and 2.", "a": "3"},
        {"prompt": "q", "completion": "a"},
    ),
    "only the prompt": ({"q": "Add 1 and 2.", "completion": "3"}, {"prompt": "q"}),
    "messages": (
        {"talk": [{"who": "human", "said": "Add 1 and 2."}, {"who": "gpt", "said": "3"}]},
        {"messages": "talk", "role": "who", "content": "said"},
    ),
    "other roles": (
        {"talk": [{"by": "customer", "text": "Add 1 and 2."}, {"by": "agent", "text": "3"}]},
        {
            "messages": "talk",
            "role": "by",
            "content": "text",
            "user": "customer",
            "assistant": "agent",
        },
    ),
    "known roles": (
        {
            "messages": [
                {"role": "human", "content": "Add 1 and 2."},
                {"role": "gpt", "content": "3"},
            ]
        },
        {},
    ),
    "other content": (
        {
            "conversations": [
                {"from": "human", "text": "Add 1 and 2."},
                {"from": "gpt", "text": "3"},
            ]
        },
        {"content": "text"},
    ),
    "alpaca": (
        {"task": "Add 1 and 2.", "with": "", "result": "3"},
        {"instruction": "task", "input": "with", "output": "result"},
    ),
    "prompt as messages": ({"prompt": [ASKED], "completion": [SAID]}, {}),
    "completion as messages": ({"prompt": "Add 1 and 2.", "completion": [SAID]}, {}),
}


@pytest.mark.parametrize("form", FIELDS)
def test_fields_with_other_names_give_the_same_tokens_as_messages(form: str, read: Read) -> None:
    row, fields = FIELDS[form]
    assert read([row], fields=fields) == read([{"messages": [ASKED, SAID]}])


def test_a_system_column_of_another_name_is_the_first_message(read: Read) -> None:
    row = {"q": "Add 1 and 2.", "a": "3", "rules": "Be brief."}
    fields = {"prompt": "q", "completion": "a", "system": "rules"}
    messages = [{"role": "system", "content": "Be brief."}, ASKED, SAID]
    assert read([row], fields=fields) == read([{"messages": messages}])


def test_only_the_needed_columns_of_a_table_are_read() -> None:
    names = ["id", "q", "a", "image", "rules", "label"]
    fields = {"prompt": "q", "completion": "a", "system": "rules"}
    assert chat_columns(names, fields=fields) == ["q", "a", "rules", "label"]
    assert chat_columns(["id", "q"], fields=fields) == ["id", "q"]


FLAGS = [
    {"training": False},
    {"train": 0},
    {"weight": 0},
    {"weight": 0.0},
    {"loss": False},
    {"loss_weight": 0.0},
    {"mask": True},
    {"masked": 1},
    {"train": True, "weight": 0},
]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_leaves_one_answer_out_of_the_counted_tokens(
    flag: dict[str, Any], template: str, read: Read
) -> None:
    [(text, counted)] = read([{"messages": [ASKED, {**SAID, **flag}, *MORE]}], template)
    assert "3<|im_end|>" in text
    assert counted.rstrip() == "That is 7.<|im_end|>"


@pytest.mark.parametrize("flag", [{"weight": 1}, {"mask": False}, {"train": True}, {"train": None}])
def test_a_flag_that_lets_a_message_count_changes_nothing(flag: dict[str, Any], read: Read) -> None:
    flagged = [{**message, **flag} for message in CHAT]
    assert read([{"messages": flagged}]) == read([{"messages": CHAT}])


def test_weight_0_of_user_and_system_messages_changes_nothing(read: Read) -> None:
    system = {"role": "system", "content": "Be brief."}
    flagged = [
        {**system, "weight": 0},
        {**ASKED, "weight": 0},
        SAID,
        {**MORE[0], "train": 0},
        MORE[1],
    ]
    assert read([{"messages": flagged}]) == read([{"messages": [system, *CHAT]}])


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_answers_in_a_prompt_of_messages_do_not_count(template: str, read: Read) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:], "system": "Be brief."}
    [(text, counted)] = read([row], template)
    assert "Be brief." in text
    assert "3<|im_end|>" in text
    assert counted.rstrip() == "That is 7.<|im_end|>"


def test_tools_may_be_json_text(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ tools | tojson if tools else '' }}" + chat_templates.MARKED
    monkeypatch.setattr(chat_templates, "TOOLS", template, raising=False)
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": CHAT, "tools": tools}
    as_text = [{**row, "tools": json.dumps(tools)}, {"messages": CHAT, "tools": ""}]
    assert read(as_text, "TOOLS") == read([row, {"messages": CHAT}], "TOOLS")


def test_texts_in_a_list_are_turns_of_user_and_assistant(read: Read) -> None:
    turns = ["What is 1 + 1?", "2.", "And 2 + 2?", "4."]
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    expected = read([{"messages": messages}], "CHATML")
    assert read([{"dialog": turns}], "CHATML", fields={"messages": "dialog"}) == expected


@pytest.mark.parametrize("template", ["MARKED", "CHATML"])
def test_variables_of_the_template_may_be_in_a_row(
    template: str, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{{ 'Think.' if thinks else '' }}" + getattr(chat_templates, template)
    monkeypatch.setattr(chat_templates, "OPTIONS", text, raising=False)
    row, options = {"messages": CHAT}, {"thinks": True}
    rows = [
        {**row, "chat_template_kwargs": options},
        {**row, "chat_template_kwargs": json.dumps(options)},
        {**row, "chat_template_kwargs": {"thinks": False}},
        row,
    ]
    read_rows = read(rows, "OPTIONS")
    assert sorted(text.startswith("Think.") for text, _ in read_rows) == [False, False, True, True]
    assert {counted for _, counted in read_rows} == {read([row], template)[0][1]}


TWICE = chat_templates.MARKED.replace(
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>\n' }}"
    "{% endgeneration %}",
)
BAD = [
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {},
        "is a pair of preferences (chosen, rejected), whose loss (DPO) is not supported; ",
    ),
    (
        {"messages": [ASKED], "chosen": SAID, "rejected": SAID},
        {},
        "is a pair of preferences (chosen, rejected)",
    ),
    (
        {"prompt": "a", "completion": "b", "label": False},
        {},
        "has label: false, an answer that is not wanted (KTO), whose loss is not supported; ",
    ),
    (
        {"messages": [ASKED, {**SAID, "weight": 2}]},
        {},
        "messages[1] has weight=2; a message counts or does not, so write 0 or 1",
    ),
    ({"messages": [ASKED, {**SAID, "train": "no"}]}, {}, "messages[1] has train=no; a message"),
    (
        {"messages": [ASKED, {**SAID, "train": False}]},
        {},
        "no token counts: no message of the assistant does; remove the flags, or the row",
    ),
    ({"messages": CHAT, "tools": "[{"}, {}, "tools is text that is not JSON: "),
    ({"messages": CHAT, "tools": '{"a": 1}'}, {}, "tools is an object, not a list of JSON sch"),
    ({"messages": CHAT, "system": ["a"]}, {}, "system is a list, not text"),
    ({"messages": CHAT, "chat_template_kwargs": [1]}, {}, "chat_template_kwargs is a list, not an"),
    ({"messages": CHAT, "chat_template_kwargs": "{"}, {}, "chat_template_kwargs is text that is"),
    (
        {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {},
        "chat_template_kwargs sets chat_template, which a row can't set",
    ),
    ({"prompt": [ASKED], "completion": []}, {}, "completion is empty"),
    ({"q": "a"}, {"prompt": "q", "completion": "a"}, "has no field a; it has q"),
    (
        {"q": "a", "a": "b"},
        {"prompt": "q", "completion": "a", "system": "s"},
        "has no field s; it has q, a",
    ),
    (
        {"talk": [{"who": "user", "said": "a"}]},
        {"messages": "talk", "role": "role", "content": "said"},
        "talk[0] has no role; it has who, said",
    ),
    (
        {"talk": [{"role": "user", "text": "a"}]},
        {"messages": "talk", "content": "said"},
        "talk[0] has no said; it has role, text",
    ),
    ({"talk": None}, {"messages": "talk"}, "talk is null, not a list of messages"),
]


@pytest.mark.parametrize(("row", "fields", "reason"), BAD, ids=[case[2] for case in BAD])
def test_rows_of_other_losses_and_missing_fields_are_refused_by_name(
    row: dict[str, Any], fields: dict[str, str], reason: str, read: Read, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        read([row], fields=fields)
    assert str(raised.value).startswith(f"data.files: {tmp_path}/chats.jsonl, line 1: {reason}")


def test_the_chosen_answer_of_a_pair_is_trained_on_where_fields_name_it(read: Read) -> None:
    row = {"prompt": "Add 1 and 2.", "chosen": "3", "rejected": "4"}
    expected = read([{"messages": [ASKED, SAID]}])
    assert read([row], fields={"prompt": "prompt", "completion": "chosen"}) == expected
    computed = {"prompt": "prompt", "completion": "{{ chosen }}"}
    assert read([row], fields=computed) == expected


def test_a_flag_with_train_on_all_is_refused(read: Read) -> None:
    with pytest.raises(ConfigError, match="message 2 has a flag that leaves it out of the loss"):
        read([{"messages": [ASKED, {**SAID, "weight": 0}, *MORE]}], train_on="all")


def test_a_flag_under_a_template_that_marks_several_parts_is_refused(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "TWICE", TWICE, raising=False)
    read([{"messages": CHAT}], "TWICE")
    with pytest.raises(ConfigError, match="marks 4 parts for 2 messages of the assistant"):
        read([{"messages": [ASKED, {**SAID, "weight": 0}, *MORE]}], "TWICE")
