"""A run on documents of files: its folder, its text, and exports of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import corpus
from support.command import Served
from support.served import Server

pytest.importorskip("transformers")

MODEL = ["model=llama_debug", "model.hidden_size=16", "model.num_hidden_layers=1"]
MODEL += ["model.num_attention_heads=2", "model.num_key_value_heads=2", "model.vocab_size=512"]
SHORT = ["strategy=single", "train.steps=2", "train.eval_batches=2", "checkpoint.every=2"]
SHORT += ["train.global_batch_size=4", "launch.backend=mock"]
DATA = ["data=documents", "data.files=[rows.jsonl]", "data.sequence_length=32"]
TOKENIZER = ["tokenizer.path=tokenizer"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    command = Served(tmp_path_factory.mktemp("runs"), server)
    corpus.save_tokenizer(command.folder / "tokenizer")
    rows = [dict(row) for row in corpus.functions()[:60]]
    corpus.write_jsonl(command.folder / "rows.jsonl", rows)
    return command


@pytest.fixture(scope="module")
def trained(command: Served) -> str:
    """Return the output of a run."""
    return command("train", *MODEL, *SHORT, *DATA, *TOKENIZER, "name=text").stdout


def test_run_prints_data_summary_and_packing_first(trained: str) -> None:
    text = " ".join(trained.split())
    assert "data: 60 documents, " in text
    assert re.search(r" rows of 32 \(\d+\.\d% full\); 1 document held out", text)


def test_the_tokenizer_is_kept_and_text_is_generated_by_it(trained: str, command: Served) -> None:
    del trained
    files = {file.name: file.read_bytes() for file in (command.folder / "tokenizer").iterdir()}
    run = command.folder / "runs" / "text"
    assert {file.name: file.read_bytes() for file in (run / "tokenizer").iterdir()} == files
    command("checkpoint", "export", "runs/text", "exported")
    exported = command.folder / "exported"
    assert {name: (exported / name).read_bytes() for name in files} == files
    overrides = ["--prompt", "def ", "--tokens", "8", "--json"]
    texts = [
        json.loads(command("sample", folder, *overrides).stdout)["text"]
        for folder in ("runs/text", "exported")
    ]
    assert texts[0] == texts[1] != ""


def test_a_run_does_not_resume_with_another_tokenizer(trained: str, command: Served) -> None:
    del trained
    other = corpus.save_tokenizer(command.folder / "other")
    with (other / "tokenizer.json").open("a") as stream:
        stream.write(" ")
    more = [*MODEL, *SHORT, *DATA, f"tokenizer.path={other}", "name=text", "train.steps=4"]
    error = command("train", *more, status=2).stderr
    assert "is not the tokenizer that the run was trained with; use " in error
    assert str(Path("runs", "text", "tokenizer")) in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*MODEL, *DATA, *TOKENIZER, "model.vocab_size=300"],
            "model.vocab_size=300: the tokenizer has 512 tokens; use 512 or more",
        ),
        (
            [*MODEL, *DATA, "tokenizer.path=nowhere"],
            "tokenizer.path=nowhere: there is no such folder, seen from ",
        ),
        (
            [*MODEL, "data=python_source", *TOKENIZER],
            "tokenizer.path=tokenizer: data=python_source takes no tokenizer; use data=documents",
        ),
        (
            [*MODEL, *DATA, *TOKENIZER, "tokenizer=bytes"],
            "tokenizer.path=tokenizer: tokenizer=bytes reads no files; use tokenizer=auto, or null",
        ),
        (
            [*MODEL, "data=documents", "data.files=[none.jsonl]"],
            "data.files=none.jsonl: no file matches, seen from ",
        ),
    ],
)
def test_tokenizer_mismatch_is_reported_before_ranks_start(
    overrides: list[str], message: str, command: Served
) -> None:
    assert f"error: {message}" in command("train", *overrides, *SHORT, status=2).stderr
    assert not [*(command.folder / "runs").glob("llama-*")]


def test_nothing_is_tokenized_before_all_else_is_well(command: Served) -> None:
    folder = command.folder / "cache"
    overrides = [*MODEL, *DATA, *TOKENIZER, f"data.cache_dir={folder}", "model.vocab_size=300"]
    command("train", *overrides, *SHORT, status=2)
    assert not folder.exists()
