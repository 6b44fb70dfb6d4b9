"""``axonlaunch data``: the tokens that it creates and shows."""

from __future__ import annotations

import json
import re

import pytest
from support import chat_templates, corpus
from support.command import Served
from support.served import Server

pytest.importorskip("transformers")

OVERRIDES = [
    "data=chat",
    "data.files=[train.jsonl]",
    "data.cache_dir=cache",
    "data.sequence_length=96",
]
TOKENIZER = "tokenizer.path=tokenizer"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    """Return the command in a folder with 50 chats and a tokenizer."""
    command = Served(tmp_path_factory.mktemp("data"), server)
    corpus.save_tokenizer(command.folder / "tokenizer", chat_template=chat_templates.CHATML)
    rows = [
        {"prompt": f"What is {number} + 1?", "completion": f"Größe {number + 1}."}
        for number in range(50)
    ]
    corpus.write_jsonl(command.folder / "train.jsonl", rows)
    return command


def test_counted_tokens_are_bracketed_without_color(command: Served) -> None:
    shown = command(
        "data", "show", *OVERRIDES, TOKENIZER, "data.packing=none", "--samples", "1"
    ).stdout
    row, source, *lines = shown.splitlines()
    number = int(row.removeprefix("row "))
    assert source.startswith(f"{command.folder}/train.jsonl, row ")
    assert lines[:6] == [
        "<|im_start|>user↵",
        f"What is {int(source.rpartition(' ')[2]) - 1} + 1?<|im_end|>↵",
        "<|im_start|>assistant↵",
        f"⟦Größe {int(source.rpartition(' ')[2])}.<|im_end|>⟧↵",
        "",
        "Tokens that count in the loss are ⟦in brackets⟧.",
    ]
    assert 0 <= number < 49
    assert lines[6].startswith("data: 50 chats, ")
    assert re.search(r"49 rows of 96 \(\d+\.\d% full\); 1 chat held out", lines[6])


def test_rows_are_shown_to_programs_token_by_token(command: Served) -> None:
    overrides = [*OVERRIDES, TOKENIZER, "data.packing=best_fit", "--samples", "2", "--json"]
    shown = json.loads(command("data", "show", *overrides).stdout)
    assert (shown["documents"], shown["held_out_rows"], len(shown["samples"])) == (50, 1, 2)
    for row in shown["samples"]:
        for piece in row["pieces"]:
            assert len(piece["tokens"]) == len(piece["texts"]) == len(piece["counted"])
            texts = zip(piece["texts"], piece["counted"], strict=True)
            counted = "".join(text for text, counts in texts if counts)
            assert counted.startswith("Größe ")
            assert counted.endswith(".<|im_end|>")


def test_data_prepare_tokenizes_once_and_reports(command: Served) -> None:
    overrides = [*OVERRIDES, TOKENIZER, "data.train_on=all"]
    first, again = (
        json.loads(command("data", "prepare", *overrides, "--json").stdout) for _ in range(2)
    )
    assert (first.pop("tokenized"), again.pop("tokenized")) == (True, False)
    assert first.pop("seconds") > 0 < again.pop("seconds")
    assert first == again
    assert first["counted_tokens"] == first["tokens"] - 50
    assert "already tokenized" in command("data", "prepare", *overrides).stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data=python_source"],
            "data.name=python_source: this dataset has no tokenizer; use data=documents or ",
        ),
        (OVERRIDES, "tokenizer.path: null selects bytes, which have no chat template; use a "),
        (
            [*OVERRIDES, "model.path=nowhere"],
            "tokenizer.path=nowhere: there is no such folder, seen from ",
        ),
        (
            [*OVERRIDES, TOKENIZER, "data.fields={messages: dialog}"],
            "data.files: {folder}/train.jsonl, line 1: has no field dialog; it has prompt, compl",
        ),
    ],
)
def test_data_command_errors_are_one_line(
    overrides: list[str], message: str, command: Served
) -> None:
    error = command("data", "show", *overrides, status=2).stderr
    assert error.startswith(f"error: {message.format(folder=command.folder)}")
    assert error.count("\n") == 1
