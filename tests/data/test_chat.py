"""Chats in files: formats, counted tokens, and errors."""

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
from axonlaunch.data.texts.text_rows import TextRows

pytest.importorskip("transformers")

CHAT = [
    {"role": "system", "content": "You know Python."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence\nthat can be changed: größer."},
    {"role": "user", "content": "And a tuple?"},
    {"role": "assistant", "content": "One that can not."},
]
SAID = ["A sequence\nthat can be changed: größer.", "One that can not."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], str]:
    """Return the folder of a tokenizer with a chat template."""
    saved: dict[str | None, str] = {}

    def folder(template: str | None) -> str:
        if template not in saved:
            content = None if template is None else getattr(chat_templates, template)
            path = tmp_path_factory.mktemp(str(template))
            saved[template] = str(corpus.save_tokenizer(path, chat_template=content))
        return saved[template]

    return folder


Chats = Callable[..., TextRows]


@pytest.fixture
def chats(tmp_path: Path, folders: Callable[[str | None], str]) -> Chats:
    """Return a dataset of chats, one per row, by a template."""

    def make(rows: list[Any], template: str | None = "CHATML", **keys: Any) -> Any:
        file = corpus.write_jsonl(tmp_path / "chats.jsonl", rows)
        arguments = {"sequence_length": 200, "packing": "none", "held_out": 0, **keys}
        config = ChatConfig(files=[str(file)], cache_dir=str(tmp_path / "cache"), **arguments)
        return build_dataset(config, TokenizerConfig(path=folders(template)))

    return make


def tokens_and_counted(dataset: TextRows) -> list[tuple[list[int], list[int]]]:
    """Return each row's input tokens and its counted targets."""
    batch = dataset.samples(range(dataset.num_samples), split="train")
    return [
        (inputs.tolist(), targets[targets != IGNORE_INDEX].tolist())
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
    ]


def written(folder: str, messages: list[dict[str, str]]) -> list[int]:
    """Return transformers' tokens of messages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
    return token_ids


SINGLE = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"}]
FORMS = {
    "messages": {"messages": SINGLE, "id": 7},
    "parts": {
        "messages": [
            {**SINGLE[0], "content": [{"type": "text", "text": "Add 1 and 2."}]},
            SINGLE[1],
        ]
    },
    "parts of LLaMA-Factory": {
        "messages": [
            {**SINGLE[0], "content": [{"type": "text", "value": "Add 1 and 2."}]},
            {**SINGLE[1], "loss_weight": 1.0},
        ]
    },
    "conversations": {
        "conversations": [
            {"from": "human", "value": "Add 1 and 2."},
            {"from": "gpt", "value": "3"},
        ]
    },
    "prompt": {"prompt": "Add 1 and 2.", "completion": "3"},
    "alpaca": {"instruction": "Add 1 and 2.", "input": "", "output": "3"},
    "absent": {"messages": None, "instruction": "Add 1 and 2.", "output": "3"},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_messages_that_transformers_would_write(
    form: str, chats: Chats, folders: Callable[[str | None], str]
) -> None:
    expected = written(folders("CHATML"), SINGLE)
    [(tokens, counted)] = tokens_and_counted(chats([FORMS[form]], train_on="all"))
    assert tokens[: len(expected) - 1] == expected[:-1]
    assert counted == expected[1:]


def test_alpacas_input_and_a_system_field_are_written_too(
    chats: Chats, folders: Callable[[str | None], str]
) -> None:
    row = {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be brief."}
    expected = written(
        folders("CHATML"),
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add.\n\n1, 2"},
            SINGLE[1],
        ],
    )
    assert tokens_and_counted(chats([row], train_on="all"))[0][1] == expected[1:]


def test_a_field_of_another_name_is_chosen_by_fields(chats: Chats) -> None:
    dialog = {"dialog": SINGLE, "messages": "something else"}
    assert chats([dialog], fields={"messages": "dialog"}).num_samples == 1


COUNTED = {
    "CHATML": "".join(f"{text}<|im_end|>" for text in SAID),
    "SILENT": "".join(f"{text}\n" for text in SAID),
    "MARKED": "".join(f"{text}<|im_end|>\n" for text in SAID),
    "INSTRUCT": "".join(f" {text}<|end|>" for text in SAID),
    "REASONING": f"{SAID[0]}<|im_end|><think>\n\n</think>\n\n{SAID[1]}<|im_end|>",
}


@pytest.mark.parametrize("template", COUNTED)
def test_assistant_tokens_count_to_end_of_turn(
    template: str, chats: Chats, folders: Callable[[str | None], str]
) -> None:
    from transformers import AutoTokenizer

    messages = CHAT[1:] if template in ("INSTRUCT", "SILENT") else CHAT
    [(tokens, counted)] = tokens_and_counted(chats([{"messages": messages}], template))
    expected = written(folders(template), messages)
    assert tokens[: len(expected) - 1] == expected[:-1]
    tokenizer = AutoTokenizer.from_pretrained(folders(template))
    assert tokenizer.decode(counted) == COUNTED[template]


def test_marks_of_a_template_are_read_as_transformers_reads_them(
    chats: Chats, folders: Callable[[str | None], str]
) -> None:
    from transformers import AutoTokenizer

    rows = [CHAT[: 3 + 2 * (number % 2)] for number in range(5)]
    tokenizer = AutoTokenizer.from_pretrained(folders("MARKED"))
    from_transformers = tokenizer.apply_chat_template(
        rows, return_dict=True, return_assistant_tokens_mask=True
    )
    expected = [
        [token for token, counts in zip(ids[1:], mask[1:], strict=True) if counts]
        for ids, mask in zip(
            from_transformers["input_ids"], from_transformers["assistant_masks"], strict=True
        )
    ]
    marked = tokens_and_counted(chats([{"messages": row} for row in rows], "MARKED"))
    assert sorted(counted for _, counted in marked) == sorted(expected)


def test_tools_reach_the_template(chats: Chats, tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools else '' }}" + chat_templates.MARKED
    folder = corpus.save_tokenizer(tmp_path / "tools", chat_template=template)
    rows = [{"messages": SINGLE, "tools": [TOOL]}, {"messages": SINGLE}]
    file = corpus.write_jsonl(tmp_path / "tools.jsonl", rows)
    config = ChatConfig(
        files=[str(file)], cache_dir=str(tmp_path), packing="none", held_out=0, sequence_length=300
    )
    dataset: Any = build_dataset(config, TokenizerConfig(path=str(folder)))
    texts = [dataset.decode(tokens) for tokens, _ in tokens_and_counted(dataset)]
    assert [json.dumps(TOOL) in text for text in texts] == [True, False]


TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
BAD = [
    ({"text": "a"}, "CHATML", "has no messages, conversations, prompt and completion, or "),
    ({"messages": []}, "CHATML", "messages is empty"),
    ({"messages": "a"}, "CHATML", "messages is text, not a list of messages"),
    ({"messages": [{"role": "user"}]}, "CHATML", "messages[0] has no content; it has role"),
    ({"messages": [{"content": "a"}]}, "CHATML", "messages[0] has no role; it has content"),
    ({"messages": ["a"]}, "CHATML", "no token counts: its roles are user; write assistant"),
    (
        {"messages": [*SINGLE, "a"]},
        "CHATML",
        "messages[2] is text, not a message with role and content",
    ),
    ({"prompt": None, "completion": "a"}, "CHATML", "prompt is null, not text"),
    ({"messages": None}, "CHATML", "messages is null, not a list of messages"),
    ({"messages": SINGLE[:1]}, "CHATML", "no token counts: its roles are user; write assistant"),
    (
        {"messages": CHAT},
        "INSTRUCT",
        "the chat template rejects it: Only user and assistant roles are supported!",
    ),
    ({"messages": CHAT}, "SILENT", "the chat template leaves out message 1, of role system"),
    (
        {"messages": [*SINGLE, CALLED]},
        "CHATML",
        "the chat template leaves out tool_calls of message 3",
    ),
    (
        {"messages": [*SINGLE, {**SINGLE[1], "reasoning_content": "1 + 2"}]},
        "MARKED",
        "the chat template leaves out reasoning_content of message 3, of role assistant",
    ),
    (
        {"messages": [*SINGLE, {**SINGLE[1], "thinking": "1 + 2"}]},
        "MARKED",
        "the chat template leaves out thinking of message 3, of role assistant",
    ),
    ({"messages": SINGLE, "tools": [TOOL]}, "CHATML", "the chat template leaves out tools"),
    (
        {"messages": [CHAT[0], {"role": "system", "content": "Python."}, *CHAT[1:]]},
        "FIRST_SYSTEM",
        "the chat template leaves out message 2, of role system",
    ),
    ({"messages": CHAT, "system": "Be brief."}, "CHATML", "has a system field and begins with a"),
    ({"messages": CHAT[1:]}, "CHANGING", "the chat template writes message 2 differently when"),
    ({"messages": CHAT[2:]}, "CHATML", "begins with the assistant, and the chat template has no"),
    (
        {"messages": [{**SINGLE[0], "content": [{"type": "image_url"}]}]},
        "CHATML",
        "messages[0] has a part of type image_url; text models accept only text",
    ),
    (
        {"messages": [SINGLE[0], {**SINGLE[1], "weight": 0.5}]},
        "CHATML",
        "messages[1] has weight=0.5; a message counts or does not, so write 0 or 1",
    ),
    (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "CHATML",
        "message 1 has an unpaired surrogate",
    ),
]


@pytest.mark.parametrize(("row", "template", "reason"), BAD, ids=[case[2] for case in BAD])
def test_a_bad_chat_is_reported_with_file_and_line_or_skipped_and_counted(
    row: Any, template: str, reason: str, chats: Chats, tmp_path: Path
) -> None:
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(ConfigError) as raised:
        chats([good, row], template)
    location = f"{tmp_path}/chats.jsonl, line 2: "
    assert str(raised.value).startswith(f"data.files: {location}{reason}")
    dataset = chats([good, row], template, on_bad_row="skip")
    assert dataset.num_samples == 1
    assert f"rows left out: 1, the first: {location}{reason}" in dataset.info.notes[-1]


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__base__.__subclasses__() }}", "{{ range(10**9) | list | length }}"],
)
def test_a_chat_template_reaches_nothing_outside_of_the_messages(
    template: str, tmp_path: Path
) -> None:
    folder = corpus.save_tokenizer(tmp_path / "hostile", chat_template=template)
    file = corpus.write_jsonl(tmp_path / "chats.jsonl", [{"messages": SINGLE}] * 2)
    chosen = ChatConfig(files=[str(file)], cache_dir=str(tmp_path), train_on="all")
    with pytest.raises(ConfigError, match=r"line 1: the chat template rejects it: "):
        build_dataset(chosen, TokenizerConfig(path=str(folder)))


def test_all_tokens_of_a_chat_count_with_train_on_all(chats: Chats) -> None:
    assert chats([{"messages": CHAT[:2]}], train_on="all").num_samples == 1
    assert chats([{"messages": CHAT[1:]}], "CHANGING", train_on="all").num_samples == 1


def test_truncated_chat_without_counted_tokens_is_dropped_and_reported(chats: Chats) -> None:
    long = [{"role": "user", "content": "word " * 300}, SINGLE[1]]
    dataset = chats([{"messages": SINGLE}, {"messages": long}])
    assert dataset.num_samples == 1
    assert dataset.info.notes[1:] == (
        "data.too_long=truncate: documents truncated: 1",
        "data: of these left out, because no token in the remaining part counts: 1",
    )


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "null selects bytes, which have no chat template; use a folder that has one"),
        (
            "",
            "the tokenizer has no chat template; use the one of the model's instruct version, or "
            "choose data.chat_template=chatml, llama3, gemma, phi3, zephyr, alpaca or a file or a ",
        ),
    ],
)
def test_a_tokenizer_without_a_chat_template_is_refused_before_a_file_is_read(
    tokenizer: str | None, message: str, folders: Callable[[str | None], str]
) -> None:
    from axonlaunch.data.texts.untokenized import find_untokenized

    path = None if tokenizer is None else folders(None)
    with pytest.raises(ConfigError) as raised:
        find_untokenized(ChatConfig(files=["none.jsonl"]), TokenizerConfig(path=path))
    assert str(raised.value).startswith(f"tokenizer.path: {message}")


def test_packed_chats_count_the_same_tokens_as_each_by_itself(chats: Chats) -> None:
    rows = [{"messages": CHAT[1 : 3 + 2 * (number % 2)]} for number in range(20)]
    alone = sorted(token for _, counted in tokens_and_counted(chats(rows)) for token in counted)
    for packing in ("concat", "best_fit"):
        packed = chats(rows, packing=packing)
        assert packed.num_samples < 20
        assert alone == sorted(t for _, counted in tokens_and_counted(packed) for t in counted)


def test_template_text_around_content_is_trained_on(chats: Chats) -> None:
    reasoned = {**SINGLE[1], "reasoning_content": "1 + 2"}
    rows = [{"messages": [*SINGLE[:1], reasoned, *SINGLE]}, {"messages": [*SINGLE, CALLED]}]
    dataset = chats(rows, "AGENT")
    texts = [dataset.decode(tokens) for tokens, _ in tokens_and_counted(dataset)]
    assert [json.dumps([CALL]) in text for text in texts] == [False, True]


def test_template_with_a_date_writes_the_configured_day(
    chats: Chats, folders: Callable[[str | None], str], tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    template = Path(trl.__file__).parent / "chat_templates" / "llama3_2.jinja"
    assert 'strftime_now("%d %b %Y")' in template.read_text()
    keys: dict[str, Any] = {"chat_template": str(template), "sequence_length": 600}
    data = chats([{"messages": CHAT}], template_date="2025-03-09", **keys)
    row = next(data.pieces(0, split="train")).tokens
    tokenizer: Any = data.tokenizer
    expected = tokenizer.transformers.apply_chat_template(CHAT, date_string="09 Mar 2025")
    assert row.tolist() == expected["input_ids"]
    assert "Today Date: 09 Mar 2025" in data.decode(row.tolist())
    assert data.info.notes[1].startswith("data.template_date=2025-03-09: the chat template writes")


def test_template_for_tools_writes_the_configured_day(tmp_path: Path) -> None:
    folder = corpus.save_tokenizer(tmp_path / "tokenizer", chat_template=chat_templates.CHATML)
    (folder / "additional_chat_templates").mkdir()
    template = "{{ strftime_now('%d %b') }}{{ tools }}{% for m in messages %}{{ m['content'] }}"
    template += "{% endfor %}"
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    file = corpus.write_jsonl(tmp_path / "chats.jsonl", [{"messages": SINGLE, "tools": [TOOL]}])
    options: dict[str, Any] = {"packing": "none", "held_out": 0, "sequence_length": 300}
    options |= {"train_on": "all", "template_date": "2025-03-09"}
    config = ChatConfig(files=[str(file)], cache_dir=str(tmp_path / "cache"), **options)
    data: Any = build_dataset(config, TokenizerConfig(path=str(folder)))
    assert data.decode(tokens_and_counted(data)[0][0]).startswith("09 Mar")


def test_date_in_a_computed_format_is_refused(chats: Chats) -> None:
    template = "{% set form = '%d' %}{{ strftime_now(form) }}{{ messages[0]['content'] }}"
    with pytest.raises(ConfigError, match="computes the format of the time that it writes"):
        chats([{"messages": CHAT}], chat_template=template, train_on="all")
