"""Prompt formats and chat templates by name, by file and as text."""

from __future__ import annotations

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
from axonlaunch.data.texts.chats.named_templates import TEMPLATES

pytest.importorskip("transformers")

ROW = {"instruction": "Add.", "input": "1, 2", "output": "3"}
TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a dataset of rows by a tokenizer without a chat template."""
    folder = corpus.save_tokenizer(tmp_path / "tokenizer")

    def make(rows: list[Any], **keys: Any) -> Any:
        file = corpus.write_jsonl(tmp_path / "rows.jsonl", rows)
        arguments = {"sequence_length": 400, "packing": "none", "held_out": 0, **keys}
        config = ChatConfig(files=[str(file)], cache_dir=str(tmp_path / "cache"), **arguments)
        return build_dataset(config, TokenizerConfig(path=str(folder)))

    return make


def written(dataset: Any) -> tuple[str, str]:
    """Return the text of the first row and its counted text, with special tokens."""
    batch = dataset.samples([0], split="train")
    [counted] = (row[row != IGNORE_INDEX].tolist() for row in batch.targets)
    tokens = batch.inputs[0].tolist()
    decode = dataset.tokenizer.decode
    return decode(tokens, special=True), decode(counted, special=True)


BELOW = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
PROMPTS = {
    "alpaca": (
        "alpaca",
        f"{BELOW}\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n",
    ),
    "text": ("Task {instruction}: {input} ->", "Task Add.: 1, 2 ->"),
    "jinja": (
        "{% for n in range(2) %}{{ instruction | upper }} {% endfor %}\n",
        "ADD. ADD. \n",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_format_by_name_or_text_writes_the_prompt_and_only_the_completion_counts(
    name: str, build: Build
) -> None:
    chosen, prompt = PROMPTS[name]
    text, counted = written(build([ROW], prompt_format=chosen))
    assert text.startswith(prompt + "3")
    assert counted == f"3{corpus.END}"


def test_a_prompt_format_in_a_file_is_read(build: Build, tmp_path: Path) -> None:
    (tmp_path / "format.txt").write_text("Q: {instruction}\n")
    text, _ = written(build([ROW], prompt_format=str(tmp_path / "format.txt")))
    assert text.startswith("Q: Add.\n3")


def test_fields_name_the_columns_of_a_prompt_format(build: Build) -> None:
    row = {"task": "Add.", "reply": "3"}
    fields = {"instruction": "task", "completion": "reply"}
    text, counted = written(build([row], prompt_format="alpaca", fields=fields))
    assert "describes a task. Write" in text
    assert "### Instruction:\nAdd.\n\n### Response:\n3" in text
    assert counted == f"3{corpus.END}"


@pytest.mark.parametrize(("chosen", "usual"), [("dolly", "instruction"), ("question", "question")])
def test_fields_replace_the_usual_columns_of_a_question_and_its_answer(
    chosen: str, usual: str, build: Build
) -> None:
    row = {usual: "No.", "task": "Add.", "output": "4", "reply": "3"}
    fields = {"prompt": "task", "answer": "reply"}
    text, counted = written(build([row], prompt_format=chosen, fields=fields))
    assert "Add.\n\nAnswer:\n3" in text
    assert counted == f"3{corpus.END}"


def test_all_tokens_of_a_prompt_count_with_train_on_all(build: Build) -> None:
    text, counted = written(build([ROW], prompt_format="{instruction}", train_on="all"))
    assert text.startswith("Add.3")
    assert counted == f"dd.3{corpus.END}"


@pytest.mark.parametrize(
    ("chosen", "row", "reason"),
    [
        ("{question}", ROW, "has no field question; it has instruction, input, output"),
        ("{{ question }}", ROW, "the prompt format rejects it: 'question' is undefined; it has in"),
        ("{instruction}", {"instruction": ["a"], "output": "3"}, "instruction is list, not text"),
        ("{instruction}", {"instruction": "a"}, "has no completion, output, response or answer; "),
        ("{instruction}", {"instruction": "a", "output": 3}, "output is int, not text"),
        (
            "{{ instruction.__class__.__mro__ }}",
            ROW,
            "the prompt format rejects it: access to attr",
        ),
        ("{{ range(10**9) | list }}", ROW, "the prompt format rejects it: Range too big"),
        ("{{ raise_it() }}", ROW, "the prompt format rejects it: 'raise_it' is undefined"),
        ("{instruction}", {**ROW, "output": "\ud800"}, "its completion has an unpaired surrogate"),
        ("{prompt}", {"prompt": "a", "chosen": "b", "rejected": "c"}, "is a pair of preferences"),
    ],
)
def test_a_row_that_a_prompt_format_rejects_is_named(
    chosen: str, row: Any, reason: str, build: Build, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        build([row], prompt_format=chosen)
    assert str(raised.value).startswith(f"data.files: {tmp_path}/rows.jsonl, line 1: {reason}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prompt_format": "{a.b}"},
            "data.prompt_format={a.b}: does not compile: {a.b} is not the",
        ),
        (
            {"prompt_format": "{a"},
            "data.prompt_format={a: does not compile: expected '}' before end",
        ),
        ({"prompt_format": "{{ a"}, "does not compile: line 1: unexpected end of template"),
        ({"prompt_format": "alpca"}, "data.prompt_format=alpca: can't be read as a file: No such"),
        (
            {"chat_template": "chatmll"},
            "data.chat_template=chatmll: can't be read as a file: No suc",
        ),
        ({"chat_template": "{% for %}"}, "does not compile: line 1: Expected an expression"),
        ({"chat_template": "{{ (" + "(" * 9999}, "does not compile: "),
        (
            {"chat_template": "x" * 9999},
            ": can't be read as a file: File name too long; use chatml",
        ),
        (
            {"prompt_format": "{a}", "chat_template": "chatml"},
            "data.chat_template=chatml: data.prompt_format writes rows without a chat template; ",
        ),
        (
            {"prompt_format": "{a}", "fields": {"messages": "b"}},
            "data.fields={messages:b}: data.prompt_format takes columns of text, not messages",
        ),
    ],
)
def test_a_template_or_format_that_does_not_compile_is_an_error_of_one_line(
    keys: dict[str, Any], message: str, build: Build
) -> None:
    with pytest.raises(ConfigError) as raised:
        build([ROW], **keys)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_chat_template_that_does_not_end_is_an_error(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axonlaunch.data.tokenizers.tokenizer._LEAST_SECONDS", 1.0)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"^data\.chat_template=.*: the chat template took more"):
        build([TALK], chat_template=loop)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_chat_template_counts_each_answer_up_to_its_end(name: str, build: Build) -> None:
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
    end = {**ends, "phi3": "<|end|>"}.get(name, corpus.END)
    text, counted = written(build([TALK], chat_template=name))
    assert counted == f"Hello{end}"
    assert text.index("Hi") < text.index("Hello")


PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Like the template of Phi-3, it writes the end token after the last message; other names."""


@pytest.mark.parametrize("num_answers", [1, 2])
def test_end_of_a_chat_after_the_end_of_its_last_turn_does_not_count(
    num_answers: int, build: Build
) -> None:
    talk = {"messages": TALK["messages"] * num_answers}
    text, counted = written(build([talk], chat_template=PHI3))
    assert f"Hello<|im_end|>\n{corpus.END}" in text
    assert counted == "Hello<|im_end|>" * num_answers


def test_a_named_chat_template_is_what_published_models_write(build: Build) -> None:
    text, _ = written(build([TALK], chat_template="chatml"))
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>")
    text, _ = written(build([TALK], chat_template="llama3"))
    assert text.startswith("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>")


def test_a_chat_template_is_kept_with_the_tokenizer(build: Build, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "template.jinja").write_text(chat_templates.CHATML)
    for chosen in (str(tmp_path / "template.jinja"), chat_templates.CHATML):
        dataset = build([TALK], chat_template=chosen)
        dataset.tokenizer.keep(tmp_path / "kept")
        loaded = AutoTokenizer.from_pretrained(tmp_path / "kept")
        assert loaded.chat_template == chat_templates.CHATML


def test_a_chat_template_replaces_that_of_the_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = corpus.save_tokenizer(tmp_path / "own", chat_template=chat_templates.SILENT)
    file = corpus.write_jsonl(tmp_path / "rows.jsonl", [TALK])
    arguments: dict[str, Any] = {"sequence_length": 400, "packing": "none", "held_out": 0}
    config = ChatConfig(
        files=[str(file)], cache_dir=str(tmp_path / "c"), chat_template="chatml", **arguments
    )
    dataset: Any = build_dataset(config, TokenizerConfig(path=str(folder)))
    assert "<|im_start|>" in written(dataset)[0]
    dataset.tokenizer.keep(tmp_path / "kept")
    kept = AutoTokenizer.from_pretrained(tmp_path / "kept")
    assert kept.chat_template == TEMPLATES["chatml"]
