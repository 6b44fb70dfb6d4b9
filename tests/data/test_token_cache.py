"""Shards of large files: bounded, identical from any process, and read once."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.shards import shard_maker, token_cache
from axonlaunch.data.shards.encoding import OnProgress
from axonlaunch.data.shards.token_cache import Corpus
from axonlaunch.data.texts.documents import DocumentEncoder
from axonlaunch.data.tokenizers.tokenizer import ByteTokenizer

pyarrow = pytest.importorskip("pyarrow")

SIZE, LONGEST = 300, 70
ROWS = [{"text": f"{number}: " + "ä" * (number % (LONGEST - 5))} for number in range(150)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS).encode()


def to_arrow(file: Path) -> None:
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)


def to_parquet(file: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=40)


def to_zst(file: Path) -> None:
    with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(file), "wb"), "zstd") as stream:
        stream.write(LINES)


FILES: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda file: file.write_bytes(LINES),
    "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(LINES)),
    "a.jsonl.bz2": lambda file: file.write_bytes(bz2.compress(LINES)),
    "a.jsonl.zst": to_zst,
    "a.json": lambda file: file.write_text(json.dumps(ROWS)),
    "a.csv": lambda file: file.write_text("\n".join(["text", *(row["text"] for row in ROWS)])),
    "a.parquet": to_parquet,
    "a.arrow": to_arrow,
}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_maker, "SHARD_SIZE", SIZE)
    monkeypatch.setattr(shard_maker, "_CHUNK_ROWS", 3)


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = tmp_path / str(request.param)
    FILES[source.name](source)
    return source


def shards_of(*files: Path, folder: Path, report: OnProgress = lambda state: None) -> Corpus:
    return Corpus(
        FileSelection([str(file) for file in files]).sources(),
        DocumentEncoder(ByteTokenizer(), field="text"),
        folder=folder,
        skip_bad=False,
        report=report,
    )


def texts(corpus: Corpus) -> list[str]:
    """Return the documents of all shards."""
    documents = []
    for shard in corpus:
        ends = list(itertools.accumulate(shard.lengths().tolist(), initial=0))
        tokens = bytes(shard.tokens().tolist())
        documents += [tokens[start:end].decode() for start, end in itertools.pairwise(ends)]
    return documents


def content(folder: Path) -> dict[Path, bytes]:
    return {
        file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }


def test_a_large_file_has_shards_of_a_bounded_size_and_is_read_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_file = SourceFile.open
    monkeypatch.setattr(
        SourceFile, "open", lambda source: opened.append(source.name) or open_file(source)
    )
    corpus = shards_of(file, folder=tmp_path / "cache")
    assert texts(corpus) == [row["text"] for row in ROWS]
    sizes = [shard.progress.characters for shard in corpus]
    assert len(sizes) > 10
    assert all(SIZE <= size < SIZE + LONGEST for size in sizes[:-1])
    assert opened == [str(file)]


def test_rebuilt_shards_have_the_same_content(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folders = [shard.folder for shard in shards_of(file, folder=cache)]
    expected = content(cache)
    for folder in folders[1::2]:
        shutil.rmtree(folder)
    again = shards_of(file, folder=cache)
    assert [shard.folder for shard in again] == folders
    assert content(cache) == expected


def test_interrupted_tokenization_continues_within_file(file: Path, tmp_path: Path) -> None:
    expected, cache = tmp_path / "expected", tmp_path / "cache"
    list(shards_of(file, folder=expected))

    def stop(state: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise InterruptedError

    for chunks in (5, 9, 14):
        left = chunks
        with pytest.raises(InterruptedError):
            list(shards_of(file, folder=cache, report=stop))
    assert len([*cache.glob("*.partial")]) == 1
    list(shards_of(file, folder=cache))
    assert content(cache) == content(expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-200], "a.jsonl.gz can't be read"),
        ("a.jsonl", LINES + b"{", "a.jsonl, line 301: is not JSON"),
    ],
)
def test_where_a_file_fails_is_not_taken_for_its_end(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    corpus = shards_of(tmp_path / name, folder=tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            list(corpus)


def test_rows_are_numbered_from_the_beginning_of_their_file(file: Path, tmp_path: Path) -> None:
    places = [
        shard.location(number)
        for shard in shards_of(file, folder=tmp_path)
        for number in range(shard.num_documents)
    ]
    step = 2 if ".jsonl" in file.name else 1  # every other line is empty
    first = 2 if file.suffix == ".csv" else 1
    assert places == [f"{file}, row {first + step * number}" for number in range(len(ROWS))]


def test_small_files_share_shards_in_their_order(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:03}.txt" for number in range(40)]
    for number, path in enumerate(files):
        path.write_text(f"text {number} ")
    corpus = shards_of(*files, folder=tmp_path / "cache")
    assert texts(corpus) == [f"text {number} " for number in range(40)]
    assert len([*corpus]) == 2


def test_a_cache_of_another_version_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    [old] = shards_of(tmp_path / "a.txt", folder=tmp_path / "cache")
    monkeypatch.setattr(token_cache, "_FORMAT", token_cache._FORMAT + 1)
    [new] = shards_of(tmp_path / "a.txt", folder=tmp_path / "cache")
    assert new.folder != old.folder
