"""``tokenizer=train``: training a tokenizer on the data, and when it is trained again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import corpus

from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import ChatConfig, DocumentsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.shards.encoding import Tokenizing

pytest.importorskip("transformers")

TRAIN = TokenizerConfig(name="train", vocab_size=600)


def documents(folder: Path, states: list[Tokenizing] | None = None, **keys: Any) -> Any:
    """Return a dataset of 60 functions of Python's library."""
    rows = [dict(row) for row in corpus.functions()[:60]]
    file = folder / "rows.jsonl"
    if not file.exists():
        corpus.write_jsonl(file, rows)
    arguments = {"cache_dir": str(folder / "cache"), "sequence_length": 64, **keys}
    report = (lambda state: None) if states is None else states.append
    return build_dataset(DocumentsConfig(files=[str(file)], **arguments), TRAIN, report=report)


def test_a_tokenizer_of_the_given_size_is_learned_that_says_all_of_the_text(tmp_path: Path) -> None:
    dataset = documents(tmp_path)
    assert dataset.num_classes == 600
    for row in corpus.functions()[:60]:
        tokens = dataset.encode(row["text"] + " größe")
        assert dataset.decode(tokens) == row["text"] + " größe"
        assert len(tokens) < len(row["text"]) / 1.5, "pairs of bytes are tokens of their own"


def test_it_is_learned_once_and_again_where_the_text_is_another(tmp_path: Path) -> None:
    first = documents(tmp_path)
    states: list[Tokenizing] = []
    again = documents(tmp_path, states)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert not states
    other = documents(tmp_path, states, text_field="doc")
    assert other.tokenizer.fingerprint != first.tokenizer.fingerprint
    assert states[0].learns
    assert str(states[0]).startswith("learning a tokenizer from ")


def test_chats_need_no_more_than_their_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"{n + 1}"} for n in range(30)]
    file = corpus.write_jsonl(tmp_path / "chats.jsonl", rows)
    chosen = ChatConfig(files=[str(file)], cache_dir=str(tmp_path), packing="none", held_out=0)
    dataset: Any = build_dataset(chosen, TRAIN)
    batch = dataset.samples([0], split="train")
    tokens = [token for token in batch.targets[0].tolist() if token != -100]
    assert dataset.tokenizer.decode(tokens, special=True).endswith("<|im_end|>\n")
    answer = dataset.decode(tokens).strip()
    assert f"What is {int(answer) - 1} + 1?" in dataset.decode(batch.inputs[0].tolist())


def test_learned_tokenizer_reads_only_the_columns_of_chats(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"{n + 1}"} for n in range(30)]
    file = corpus.write_parquet_with_a_broken_column(tmp_path / "chats.parquet", rows)
    chosen = ChatConfig(files=[str(file)], cache_dir=str(tmp_path), packing="none", held_out=0)
    assert build_dataset(chosen, TRAIN).num_samples == 30


def test_a_learned_tokenizer_writes_calls_of_tools_and_reasoning(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    question = {"role": "user", "content": "Add 1."}
    called = {"role": "assistant", "reasoning_content": "So I add.", "tool_calls": [call]}
    file = corpus.write_jsonl(
        tmp_path / "chats.jsonl", [{"messages": [question, called], "tools": [tool]}] * 9
    )
    chosen = ChatConfig(files=[str(file)], cache_dir=str(tmp_path), packing="none", held_out=0)
    dataset: Any = build_dataset(chosen, TRAIN)
    batch = dataset.samples([0], split="train")
    said = dataset.decode([token for token in batch.targets[0].tolist() if token != -100])
    assert said == f"<think>\nSo I add.\n</think>\n{json.dumps([call])}\n"
    assert json.dumps([tool]) in dataset.decode(batch.inputs[0].tolist())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data=python_source"],
            "tokenizer.name=train: data=python_source takes no tokenizer; use data=documents or ",
        ),
        (
            ["data=documents", "data.files=[x.jsonl]", "tokenizer.path=folder"],
            "tokenizer.path=folder: tokenizer=train reads no tokenizer; use ",
        ),
        (
            ["data=documents", "data.files=[x.jsonl]", "tokenizer.vocab_size=200"],
            "tokenizer.vocab_size=200: must be at least 300",
        ),
    ],
)
def test_mismatched_learned_tokenizer_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load(["tokenizer=train", *overrides])
    assert str(raised.value).startswith(message)
