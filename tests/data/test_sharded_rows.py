"""Rows of files that are tokenized while a run trains on earlier ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import corpus
from support.configured import run_config

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import DocumentsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.datasets.loader import Loader, order_of
from axonlaunch.data.shards import shard_maker
from axonlaunch.data.shards.token_cache import Shard
from axonlaunch.data.texts.sharded_rows import ShardedRows

SHARDS, DOCUMENTS = 4, 12


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each of the fixture's files a separate shard."""
    monkeypatch.setattr(shard_maker, "SHARD_SIZE", 300)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Create files of documents that name their file and their number."""
    return [
        corpus.write_jsonl(
            tmp_path / f"{file}.jsonl",
            [{"text": f"{file}:{number} " * (3 + number % 4)} for number in range(DOCUMENTS)],
        )
        for file in range(SHARDS)
    ]


def made(files: list[Path], **keys: Any) -> Any:
    options = {"sequence_length": 24, "held_out": 2, "shuffle": "shards", **keys}
    options["cache_dir"] = str(files[0].parent / "cache")
    config = DocumentsConfig(files=[str(file) for file in files], **options)
    return build_dataset(config, TokenizerConfig(name="bytes"))


def shards_in(folder: Path) -> int:
    return len([entry for entry in (folder / "cache").iterdir() if entry.suffix != ".partial"])


def test_first_batch_tokenizes_only_first_file(
    files: list[Path],
) -> None:
    dataset = made(files)
    loader = Loader(dataset, seed=1, global_batch_size=4)
    assert shards_in(files[0].parent) == 1
    loader.batch(0)
    assert shards_in(files[0].parent) == 1
    num_shards = 1
    for step in range(40):
        loader.batch(step)
        assert num_shards <= shards_in(files[0].parent) <= num_shards + 1
        num_shards = shards_in(files[0].parent)
    assert num_shards == SHARDS


def test_a_pass_has_each_row_once_and_the_next_one_another_order(files: list[Path]) -> None:
    dataset = made(files)
    order_of(dataset, np.array([10_000]), seed=3)  # all shards are tokenized
    rows = dataset._first_rows[-1]
    first = order_of(dataset, np.arange(rows), seed=3)
    second = order_of(dataset, np.arange(rows, 2 * rows), seed=3)
    assert sorted(first) == sorted(second) == list(range(rows))
    assert list(first) != list(second)
    assert list(first) != list(order_of(dataset, np.arange(rows), seed=4))
    ends = dataset._first_rows
    for start, end in itertools.pairwise(ends):  # one shard after the other
        assert sorted(first[start:end]) == list(range(start, end))


def test_each_later_pass_has_the_rows_of_each_shard_in_another_order(files: list[Path]) -> None:
    dataset = made(files, packing="none")
    rows = sum(count for count, _ in dataset.shard_rows())
    passes = [order_of(dataset, np.arange(rows) + n * rows, seed=3) for n in range(4)]
    for start, end in itertools.pairwise(dataset._first_rows):
        orders = {tuple(part[(part >= start) & (part < end)]) for part in passes}
        assert len(orders) == len(passes)


@pytest.mark.parametrize("filling", [{"packing": "none"}, {"sequence_length": 48}])
def test_rows_are_counted_for_each_packing_and_length(
    files: list[Path], filling: dict[str, Any]
) -> None:
    """Includes a cache in which a run with other rows has left its counts."""
    num_rows = made(files).shard_rows()
    after = made(files, **filling).shard_rows()
    assert num_rows != after
    assert all(counted == filled for counted, filled in [*num_rows, *after])


def test_shuffled_order_is_independent_of_access_pattern(files: list[Path]) -> None:
    """By one or several shards, from the first or a later step, in this process or another."""
    full = made(files)
    expected = {
        step: Loader(full, seed=5, global_batch_size=4).batch(step).inputs for step in range(30)
    }
    for first_step in (0, 7, 29):
        again = made(files)
        shards = [
            Loader(again, seed=5, global_batch_size=4, num_shards=2, shard=shard).batch(first_step)
            for shard in range(2)
        ]
        assert torch.equal(torch.cat([part.inputs for part in shards]), expected[first_step])


def test_resume_reads_only_current_shard(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = made(files)
    order_of(full, np.array([10_000]), seed=5)  # all shards are tokenized
    last = full._first_rows[-1] - 1
    expected = Loader(full, seed=5, global_batch_size=1).batch(last).inputs
    read: list[Path] = []
    lengths = Shard.lengths
    monkeypatch.setattr(Shard, "lengths", lambda shard: read.append(shard.folder) or lengths(shard))
    again = made(files)
    assert torch.equal(Loader(again, seed=5, global_batch_size=1).batch(last).inputs, expected)
    shards = [shard.folder for shard in again._corpus]
    assert len(shards) == SHARDS
    assert read == [shards[0], shards[-1]], "of the first one are the rows that are held out"
    for folder in shards:
        for note in folder.glob("rows-*.json"):
            note.write_text("{")  # as a full disk leaves it
    assert torch.equal(
        Loader(made(files), seed=5, global_batch_size=1).batch(last).inputs, expected
    )


def test_held_out_rows_of_first_file_are_not_trained_on(files: list[Path]) -> None:
    dataset = made(files, packing="none")
    held_out = dataset.samples(range(dataset.num_eval_samples), split="eval").inputs
    order_of(dataset, np.array([10_000]), seed=0)
    rows = dataset._first_rows[-1]
    trained = dataset.samples(range(rows), split="train").inputs
    assert rows == SHARDS * DOCUMENTS - 2
    assert held_out[:, 0].tolist() == [ord("0")] * 2
    both = {tuple(row) for row in held_out.tolist()} & {tuple(row) for row in trained.tolist()}
    assert not both


def test_rows_have_the_documents_of_a_corpus_that_is_tokenized_first(files: list[Path]) -> None:
    sharded, full = (made(files, held_out=0, shuffle=order) for order in ("shards", "all"))
    summary, other = sharded.summaries()[""], full.summaries()[""]
    assert (summary.documents, summary.tokens) == (other.documents, other.tokens)
    assert summary.counted_tokens == other.counted_tokens


@pytest.mark.slow
def test_another_process_tokenizes_the_rest_and_ends_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the process divides files by the default rules
    rows = [{"text": "half of a shard " * (shard_maker.SHARD_SIZE // 32)}] * 3
    dataset = made([corpus.write_jsonl(tmp_path / "large.jsonl", rows)], held_out=0)
    assert isinstance(dataset, ShardedRows)
    tokenizer = TokenizerConfig(name="bytes")
    with dataset.tokenizing_ahead(tokenizer) as process:
        pass
    assert process.returncode == -9
    with dataset.tokenizing_ahead(tokenizer) as process:
        assert process.wait(timeout=60) == 0
    names = {folder.name for folder in (tmp_path / "cache").iterdir()}
    assert len(names) == 2
    dataset.summaries()
    assert {folder.name for folder in (tmp_path / "cache").iterdir()} == names


def test_a_bad_row_of_a_later_file_is_reported_when_its_turn_comes(files: list[Path]) -> None:
    with files[2].open("a") as stream:
        stream.write(json.dumps({"other": 1}) + "\n")
    dataset = made(files)
    loader = Loader(dataset, seed=1, global_batch_size=4)
    loader.batch(0)
    with pytest.raises(ConfigError, match=r"2\.jsonl, line 13: "):
        [loader.batch(step) for step in range(100)]


def test_options_that_need_all_rows_are_refused_for_streams(files: list[Path]) -> None:
    overrides = ["data=documents", f"data.files=[{files[0]}]", "data.shuffle=shards", "model=gpt"]
    overrides += [f"data.cache_dir={files[0].parent}/cache", "train.global_batch_size=2"]
    overrides += ["data.sequence_length=24", "data.held_out=2"]
    with pytest.raises(ConfigError, match=r"train\.epochs=2.*before all of it is tokenized"):
        run_config([*overrides, "train.steps=auto", "train.epochs=2"])
    run_config([*overrides, "train.steps=1000"])
    mix = f"data.mix={{a: {{files: [{files[0]}]}}, b: {{files: [{files[1]}]}}}}"
    with pytest.raises(ConfigError, match=r"data\.shuffle=shards: data\.mix is shuffled over all"):
        run_config([*[word for word in overrides if "files" not in word], mix])


def test_batch_larger_than_dataset_is_refused_with_remedy(
    files: list[Path],
) -> None:
    overrides = ["data=documents", f"data.files=[{files[0]}]", "model=gpt", "data.held_out=2"]
    overrides += [f"data.cache_dir={files[0].parent}/cache", "data.sequence_length=100"]
    message = r"train\.global_batch_size=32: more than the rows of 100 tokens that the data fills: "
    with pytest.raises(ConfigError, match=rf"{message}2; .* a shorter data\.sequence_length"):
        run_config([*overrides, "train.global_batch_size=32", "train.steps=2"])
