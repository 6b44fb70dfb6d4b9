"""Documents in files: tokenized once, packed into rows, with errors reported."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import corpus

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import DocumentsConfig, HeldOutConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.datasets.dataset import IGNORE_INDEX
from axonlaunch.data.datasets.loader import Loader, order_of
from axonlaunch.data.shards import shard_maker, token_cache
from axonlaunch.data.shards.encoding import Tokenizing
from axonlaunch.data.texts.text_rows import TextRows

ROWS = [{"text": row["text"]} for row in corpus.functions()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    pytest.importorskip("transformers")
    return TokenizerConfig(path=str(corpus.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


Documents = Callable[..., TextRows]


@pytest.fixture
def documents(tmp_path: Path, tokenizer: TokenizerConfig) -> Documents:
    """Return a dataset of rows, stored below the test's folder."""

    def make(
        rows: list[Any] = ROWS, *, files: Any = None, bytes_: bool = False, **keys: Any
    ) -> Any:
        if files is None:
            files = [str(corpus.write_jsonl(tmp_path / "a.jsonl", rows))]
        arguments = {"cache_dir": str(tmp_path / "cache"), "sequence_length": 64, **keys}
        report = arguments.pop("report", lambda state: None)
        chosen = TokenizerConfig(name="bytes") if bytes_ else tokenizer
        return build_dataset(DocumentsConfig(files=files, **arguments), chosen, report=report)

    return make


def by_transformers(tokenizer: TokenizerConfig) -> list[list[int]]:
    """Return transformers' tokens of each row, with the token that ends a text."""
    from transformers import AutoTokenizer

    tokenizer_of_transformers = AutoTokenizer.from_pretrained(tokenizer.path)
    return [
        [
            *tokenizer_of_transformers(row["text"])["input_ids"],
            tokenizer_of_transformers.eos_token_id,
        ]
        for row in ROWS
    ]


def pieces(dataset: TextRows, split: Any = "train") -> list[list[int]]:
    """Return the documents, or pieces, of all rows: their tokens and the last target."""
    count = dataset.num_samples if split == "train" else dataset.num_eval_samples
    batch = dataset.samples(range(count), split=split)
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
    documents_of_rows = []
    for tokens, targets, places in zip(batch.inputs, batch.targets, positions, strict=True):
        starts = [*torch.nonzero(places == 0).flatten().tolist(), len(tokens)]
        for start, end in itertools.pairwise(starts):
            counted = int((targets[start:end] != IGNORE_INDEX).sum())
            if counted:
                assert (
                    targets[start : start + counted - 1].tolist()
                    == tokens[start + 1 : start + counted].tolist()
                )
                assert places[start:end].tolist() == list(range(end - start))
                last = targets[start + counted - 1].item()
                documents_of_rows.append([*tokens[start : start + counted].tolist(), last])
    return documents_of_rows


def test_tokens_are_those_of_transformers_and_a_document_ends_with_its_end(
    documents: Documents, tokenizer: TokenizerConfig
) -> None:
    dataset = documents(packing="none", sequence_length=20_000)
    assert dataset.num_classes == 512
    expected = by_transformers(tokenizer)
    held_out = pieces(dataset, "eval")
    assert len(held_out) == 2
    assert sorted([*pieces(dataset), *held_out]) == sorted(expected)


def test_concat_cuts_documents_where_a_row_ends_and_loses_nothing(
    documents: Documents, tokenizer: TokenizerConfig
) -> None:
    dataset = documents(packing="concat", held_out=0)
    joined: list[list[int]] = [[]]
    end = 0  # the token that ends a document
    for piece in pieces(dataset):
        joined[-1] += piece if not joined[-1] else piece[1:]
        if piece[-1] == end:
            joined.append([])
    assert joined[:-1] == by_transformers(tokenizer)


def test_best_fit_truncates_long_documents_and_counts_them(
    documents: Documents, tokenizer: TokenizerConfig
) -> None:
    dataset = documents(packing="best_fit", held_out=0, sequence_length=128)
    expected = by_transformers(tokenizer)
    assert sorted(pieces(dataset)) == sorted(row[:128] for row in expected)
    long = sum(len(row) > 128 for row in expected)
    assert f"data.too_long=truncate: documents truncated: {long}" in dataset.info.notes


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_long_documents_are_dropped_or_refused_with_file_and_row(
    packing: str, documents: Documents, tmp_path: Path
) -> None:
    rows = [{"text": "a"}, {"text": "b" * 40}, {"text": "c" * 41}, {"text": "d" * 50}]
    keys = {"packing": packing, "sequence_length": 40, "bytes_": True, "held_out": 0}
    rows[0]["text"] = "ab"
    assert len(pieces(documents(rows, too_long="drop", **keys))) == 2
    with pytest.raises(ConfigError) as raised:
        documents(rows, too_long="error", **keys)
    assert str(raised.value.problems[0]) == (
        f"data.too_long=error: {tmp_path}/a.jsonl, row 3: 41 tokens (and 1 more); a row takes 40; "
        "use data.sequence_length=50, truncate or drop"
    )


@pytest.mark.parametrize("packing", ["none", "best_fit", "concat"])
def test_short_documents_are_left_out_and_counted(packing: str, documents: Documents) -> None:
    rows = [{"text": letter * 10 * n} for n, letter in enumerate("abcd", 1)]
    keys = {"packing": packing, "sequence_length": 40, "bytes_": True, "held_out": 0}
    dataset = documents(rows, min_tokens=30, **keys)
    found = {letter for piece in pieces(dataset) for letter in dataset.decode(piece)}
    assert {"a", "b", "c", "d"} & found == {"c", "d"}
    assert "data.min_tokens=30: shorter documents left out: 2" in dataset.info.notes


def test_bytes_are_the_tokens_where_there_is_no_tokenizer(documents: Documents) -> None:
    dataset = documents([{"text": "größe"}, {"text": "ab"}], bytes_=True, held_out=0)
    assert dataset.num_classes == 256
    assert pieces(dataset) == [list("größe".encode()), [97, 98]]
    assert dataset.decode(dataset.encode("größe")) == "größe"


def test_held_out_split_is_disjoint_and_depends_only_on_data(
    documents: Documents, tmp_path: Path
) -> None:
    rows = [{"text": f"document {number}"} for number in range(50)]
    every = {"packing": "none", "bytes_": True}
    for held_out, count in ((0.1, 5), (7, 7), (0.001, 1)):
        dataset = documents(rows, held_out=held_out, **every)
        texts = {bytes(piece) for piece in pieces(dataset)}
        evaluated = {bytes(piece) for piece in pieces(dataset, "eval")}
        assert (len(texts), len(evaluated)) == (50 - count, count)
        assert not texts & evaluated
    other = corpus.write_jsonl(tmp_path / "b.jsonl", [{"text": "held out"}])
    assert pieces(documents(rows, held_out=[str(other)], **every), "eval") == [list(b"held out")]
    with pytest.raises(ConfigError, match=r"a\.jsonl is also in data\.files"):
        documents(rows, held_out=[str(tmp_path / "a.jsonl")], **every)
    with pytest.raises(ConfigError, match="there are only 50 documents, so none would be left"):
        documents(rows, held_out=50, **every)


def test_problems_of_held_out_files_name_their_key(documents: Documents, tmp_path: Path) -> None:
    limited = HeldOutConfig(files=[str(tmp_path / "a.jsonl")], limit=1)
    remedy = r"rows of .* remove the file there, or hold out a part of it: data\.held_out=0\.05"
    with pytest.raises(ConfigError, match=rf"^data\.held_out\.files=.*{remedy}"):
        documents(held_out=limited, bytes_=True)
    bad = corpus.write_jsonl(tmp_path / "b.jsonl", [{"other": "no text"}])
    with pytest.raises(ConfigError, match=r"^data\.held_out: .*b\.jsonl"):
        documents(held_out=[str(bad)], bytes_=True)


def test_tokens_are_made_once_for_a_file_a_tokenizer_and_a_field(
    documents: Documents, tmp_path: Path
) -> None:
    runs: list[Tokenizing] = []
    first = documents(report=runs.append)
    assert runs
    assert [state.fraction for state in runs] == sorted(state.fraction for state in runs)
    assert runs[-1].fraction == 1.0
    runs.clear()
    again = documents(files=[str(tmp_path / "a.jsonl")], packing="none", report=runs.append)
    assert not runs
    assert again.num_samples == 198
    assert first.num_samples > 198
    documents([{"text": "other content"}] * 9, report=runs.append)
    assert runs, "the file has changed"


def kill_while_tokenizing(config: DocumentsConfig, tokenizer: TokenizerConfig, after: int) -> None:
    """Kill this process when some chunks are written."""
    count = 0

    def end(state: Tokenizing) -> None:
        nonlocal count
        count += 1
        if count == after:
            os.kill(os.getpid(), signal.SIGKILL)

    shard_maker._CHUNK_ROWS = 10
    build_dataset(config, tokenizer, report=end)


def test_killed_in_the_middle_it_continues_where_it_stopped(
    documents: Documents,
    tokenizer: TokenizerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = documents(cache_dir=str(tmp_path / "other"))
    file, cache = str(tmp_path / "a.jsonl"), tmp_path / "cache"
    config = DocumentsConfig(files=[file], cache_dir=str(cache), sequence_length=64)
    process = multiprocessing.get_context("fork").Process(
        target=kill_while_tokenizing, args=(config, tokenizer, 9)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    [partial] = cache.glob("*.partial")
    done = json.loads((partial / "progress.json").read_text())
    assert 0 < done["row"] < 200
    with (partial / "tokens.bin").open("ab") as stream:
        stream.write(b"of a chunk that is not on record")
    read: list[int] = []
    encode = shard_maker._encode_chunk
    monkeypatch.setattr(
        shard_maker,
        "_encode_chunk",
        lambda chunk, encoder: read.extend(n for n, _ in chunk.rows) or encode(chunk, encoder),
    )
    continued = documents(files=[file])
    assert read[0] == done["row"] + 1
    assert pieces(continued) == pieces(expected)
    assert not [*cache.glob("*.partial")]


def hold(folder: str, ready: Any) -> None:
    """Tokenize as another process would, slowly."""
    with token_cache.writer_lock(Path(folder), waits=lambda: None):
        ready.set()
        time.sleep(30)


def test_two_that_want_the_same_tokens_make_them_once(documents: Documents, tmp_path: Path) -> None:
    documents()
    [shard] = (tmp_path / "cache").iterdir()
    complete = shard.rename(shard.with_name("aside"))
    partial = shard.with_name(f"{shard.name}.partial")
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=hold, args=(str(partial), ready))
    other.start()
    assert ready.wait(30)
    waited: list[Tokenizing] = []

    def complete_it(state: Tokenizing) -> None:
        if state.waits:  # the other process completes the shard, and releases it
            complete.rename(shard)
            partial.rmdir()
            other.kill()
        waited.append(state)

    dataset = documents(files=[str(tmp_path / "a.jsonl")], report=complete_it)
    other.join()
    assert [state.waits for state in waited] == [True], "it made tokens itself"
    assert dataset.num_samples > 100


def test_a_shard_that_was_damaged_is_made_again(documents: Documents, tmp_path: Path) -> None:
    expected = pieces(documents())
    [shard] = (tmp_path / "cache").iterdir()
    with (shard / "tokens.bin").open("r+b") as stream:
        stream.truncate(100)
    assert pieces(documents(files=[str(tmp_path / "a.jsonl")])) == expected


@pytest.mark.parametrize(
    ("bad", "more"),
    [(1, ""), (2, " (and 1 more row so far)"), (3, " (and 2 more rows so far)")],
)
def test_error_about_a_bad_row_counts_the_others(bad: int, more: str) -> None:
    progress = shard_maker.Progress(bad=bad, listed=("rows.jsonl, line 2: is not JSON",))
    assert str(shard_maker.BadRowsError(progress)) == f"rows.jsonl, line 2: is not JSON{more}"


BAD = [
    ('{"body": "a"}', "has no field text; it has body"),
    ('{"text": null}', "field text is null, not text"),
    ('{"text": ["a"]}', "field text is list, not text"),
    ('{"text": "\\ud800"}', "text has an unpaired surrogate, which is not a character"),
    ("{", "is not JSON (Expecting property name enclosed in double quotes: line 2 column 1 "),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_row_is_reported_with_file_and_line_or_skipped_and_counted(
    line: str, reason: str, documents: Documents, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "good one"}\n' + line + '\n{"text": "good two"}\n')
    keys = {"files": [str(file)], "bytes_": True, "held_out": 0, "packing": "none"}
    with pytest.raises(ConfigError) as raised:
        documents(**keys)
    assert str(raised.value).startswith(f"data.files: {file}, line 2: {reason}")
    assert "write data.on_bad_row=skip to leave such rows out" in str(raised.value)
    dataset = documents(on_bad_row="skip", **keys)
    assert pieces(dataset) == [list(b"good one"), list(b"good two")]
    assert (
        f"data.on_bad_row=skip: rows left out: 1, the first: {file}, line 2: "
        in (dataset.info.notes[-1])
    )
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        documents(**keys)


def test_rows_of_files_with_other_schemas_are_bad_rows_of_theirs(
    documents: Documents, tmp_path: Path
) -> None:
    first = corpus.write_jsonl(tmp_path / "one.jsonl", [{"text": "a good row"}])
    two = corpus.write_jsonl(tmp_path / "two.jsonl", [{"content": "of another schema"}])
    with pytest.raises(ConfigError, match=r"two\.jsonl, line 1: has no field text; it has content"):
        documents(files=[str(first), str(two)])


def test_parquet_columns_without_documents_are_not_read(
    documents: Documents, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"text": "a text"}] * 9
    file = corpus.write_parquet_with_a_broken_column(tmp_path / "a.parquet", rows)
    keys = {"files": [str(file)], "bytes_": True, "held_out": 0, "packing": "none"}
    assert pieces(documents(**keys)) == [list(b"a text")] * 9
    with pytest.raises(ConfigError, match=r"a\.parquet can't be read: .*CRC"):
        documents(text_field="words", **keys)


def test_files_that_hold_no_row_or_no_text_are_left_out_and_counted_where_bad_rows_are(
    documents: Documents, tmp_path: Path
) -> None:
    good = corpus.write_jsonl(tmp_path / "good.jsonl", [{"text": "a good row"}])
    empty, latin = tmp_path / "empty.jsonl", tmp_path / "latin.txt"
    empty.write_text("")
    latin.write_bytes("très bon".encode("latin-1"))
    keys = {"files": [str(empty), str(good), str(latin)], "bytes_": True, "held_out": 0}
    dataset = documents(on_bad_row="skip", packing="none", **keys)
    assert pieces(dataset) == [list(b"a good row")]
    assert f"rows left out: 2, the first: {empty} holds no rows" in dataset.info.notes[-1]
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no rows"):
        documents(**keys)
    with pytest.raises(
        ConfigError, match=r"latin\.txt, row 1: is not UTF-8 .*byte 2.*iconv -f LATIN1"
    ):
        documents(**{**keys, "files": [str(latin)]})


def test_files_without_a_row_are_refused(documents: Documents, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no rows"):
        documents(files=[str(tmp_path / "empty.jsonl")])
    with pytest.raises(ConfigError, match=r"there are no training documents"):
        documents([{"text": ""}], held_out=0)
    with pytest.raises(
        ConfigError,
        match=r"training documents; data.too_long=drop: documents left out: 1; use a "
        r"data.sequence_length above \d+; the longest has 2,999 tokens",
    ):
        documents([{"text": "word " * 999}], held_out=0, too_long="drop", packing="none")
    with pytest.raises(ConfigError, match=r"data.min_tokens=9: shorter documents left out: 1"):
        documents([{"text": "a"}], held_out=0, min_tokens=9)


def test_batch_has_positions_only_if_rows_hold_several_documents(
    documents: Documents,
) -> None:
    for packing in ("concat", "best_fit", "none"):
        dataset = documents(packing=packing)
        batch = dataset.samples([0, 1], split="train")
        assert dataset.info.is_packed == (batch.positions is not None) == (packing != "none")
        assert batch.inputs.shape == batch.targets.shape == (2, 64)
        assert batch.inputs.dtype == torch.int64
    assert np.array_equal(
        dataset.samples([3], split="train").inputs,
        dataset.samples(np.array([3]), split="train").inputs,
    )


@pytest.mark.parametrize("packing", ["none", "concat"])
def test_rows_stay_in_the_order_of_the_files_without_shuffling(
    packing: str, documents: Documents
) -> None:
    rows = [{"text": chr(ord("a") + number) * 9} for number in range(12)]
    keys = {"packing": packing, "sequence_length": 10, "held_out": 0, "shuffle": "none"}
    dataset = documents(rows, bytes_=True, **keys)
    count = dataset.num_samples
    order = order_of(dataset, np.arange(2 * count), seed=3)
    assert order.tolist() == [*range(count), *range(count)]
    first = dataset.samples(order[:count], split="train").inputs[:, 0].tolist()
    assert first == sorted(first)
    for step in (1, 2, 7):  # of a run that resumes there, on two ranks
        ranks = [
            Loader(dataset, seed=3, global_batch_size=4, num_shards=2, shard=rank).batch(step)
            for rank in range(2)
        ]
        rows_of_step = dataset.samples(np.arange(4 * step, 4 * step + 4) % count, split="train")
        assert torch.equal(torch.cat([batch.inputs for batch in ranks]), rows_of_step.inputs)
