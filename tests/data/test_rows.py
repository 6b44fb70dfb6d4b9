"""Rows of files in every format, and errors in them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axonlaunch.config import ConfigError
from axonlaunch.data.files.rows import BadRow, RowReader, UnreadableFileError
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.texts.chats.chat_rows import chat_columns

pyarrow = pytest.importorskip("pyarrow")

ROWS = [{"text": f"row {number} ü", "n": str(number)} for number in range(3000)]


def lines(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def to_csv(delimiter: str) -> bytes:
    quoted = [f'"{row["text"]}"{delimiter}{row["n"]}\r\n' for row in ROWS]
    return "".join([f"text{delimiter}n\r\n", *quoted]).encode()


def to_zst(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def to_parquet() -> bytes:
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=1000)
    return sink.getvalue().to_pybytes()


def to_arrow(make: str) -> bytes:
    import pyarrow.ipc

    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(ROWS)
    with getattr(pyarrow.ipc, make)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return sink.getvalue().to_pybytes()


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lines,
    "a.jsonl.gz": lambda: gzip.compress(lines()),
    "a.json.gz": lambda: gzip.compress(lines()),
    "a.jsonl.bz2": lambda: bz2.compress(lines()),
    "a.jsonl.xz": lambda: lzma.compress(lines()),
    "a.jsonl.zst": lambda: to_zst(lines()),
    "a.json": lambda: json.dumps(ROWS).encode(),
    "a.csv": lambda: to_csv(","),
    "a.tsv": lambda: to_csv("\t"),
    "a.parquet": to_parquet,
    "a.arrow": lambda: to_arrow("new_stream"),
    "b.arrow": lambda: to_arrow("new_file"),
}


def read(path: Path, *, skip: int = 0) -> list[tuple[int, Any]]:
    [source] = FileSelection([str(path)]).sources()
    return list(RowReader(source, skip=skip))


@pytest.mark.parametrize("name", FILES)
def test_the_rows_of_each_format_are_read_and_some_can_be_passed_over(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    rows = read(tmp_path / name)
    assert [row for _, row in rows] == ROWS
    assert read(tmp_path / name, skip=rows[1233][0]) == rows[1234:]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow"])
def test_only_requested_columns_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    [source] = FileSelection([str(tmp_path / name)]).sources()
    read = [row for _, row in RowReader(source, columns=lambda names: [names[1]])]
    assert read == [{"n": row["n"]} for row in ROWS]


def test_a_chat_of_a_table_is_read_of_the_columns_of_its_form() -> None:
    names = ["id", "image", "tools", "messages", "input"]
    assert chat_columns(names, fields={}) == ["tools", "messages"]
    assert chat_columns(names, fields={"messages": "input"}) == ["tools", "input"]
    assert chat_columns(["id", "prompt", "tools"], fields={}) == ["id", "prompt", "tools"]
    alpaca = ["instruction", "input", "output"]
    assert chat_columns([*alpaca, "text"], fields={}) == alpaca


def test_a_text_file_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read(tmp_path / "a.txt") == [(1, "one\ntwo\n")]


def test_a_folder_of_datasets_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    sources = FileSelection([str(tmp_path / "one")]).sources()
    assert len(sources) == 2
    assert [row for source in sources for _, row in RowReader(source)] == ROWS
    with pytest.raises(ConfigError, match=r"it has several splits; write .*/splits/train"):
        FileSelection([str(tmp_path / "splits")]).sources()


def test_urls_that_fsspec_reaches_are_expanded_and_read() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe(f"/corpus/{name}.jsonl.gz", gzip.compress(lines([{"text": name}])))
    try:
        sources = FileSelection(["memory://corpus/*.jsonl.gz"]).sources()
        rows = [row for source in sources for _, row in RowReader(source)]
        assert rows == [{"text": "a"}, {"text": "b"}]
    finally:
        memory.rm("/corpus", recursive=True)


def test_all_unmatched_file_patterns_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.docx").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        FileSelection(["none*.jsonl", "folder", "a.docx", "memory://none.jsonl"]).sources()
    none, folder, docx, url = map(str, raised.value.problems)
    assert none.startswith("data.files=none*.jsonl: no file matches, seen from ")
    assert folder == (
        "data.files=folder: it is a folder; write folder/**/*.jsonl for the files in it"
    )
    assert "a.docx has an unknown format; known: .jsonl, " in docx
    assert url == "data.files=memory://none.jsonl: no file matches"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst"])
def test_a_compressed_file_that_ends_too_early_is_refused(name: str, tmp_path: Path) -> None:
    content = FILES[name]()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UnreadableFileError, match=rf"{name} can't be read( after line \d+)?: "):
        read(tmp_path / name)


def test_a_page_of_parquet_that_is_broken_is_refused_after_the_rows_before_it(
    tmp_path: Path,
) -> None:
    import pyarrow.parquet

    table, file = pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file, row_group_size=1000, write_page_checksum=True)
    page = pyarrow.parquet.ParquetFile(file).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[page + 60] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(UnreadableFileError, match=r"a\.parquet can't be read after row \d+: .*CRC"):
        read(file)


@pytest.mark.parametrize(
    ("name", "content", "number", "reason"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a"', 3, "is not JSON (Expecting ':' delimiter"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', 2, "is list, not an object with fields"),
        ("a.jsonl", b'{"a": "\xff"}\n', 1, "is not UTF-8 (invalid start byte at byte 7)"),
        ("a.json", b'[{"a": 1}, 3]', 2, "is int, not an object with fields"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", 3, "has 3 columns, and the header 2"),
        ("a.csv", b"a,b\n1\n", 2, "ends before its column b"),
        ("a.csv", b"a,b\n1,\xfc\n", 2, "is not UTF-8"),
    ],
)
def test_invalid_row_is_returned_with_line_and_reason(
    name: str, content: bytes, number: int, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    [(line, bad)] = [(line, row) for line, row in read(tmp_path / name) if isinstance(row, BadRow)]
    assert line == number
    assert bad.reason.startswith(reason)


def test_columns_of_one_name_are_refused_for_either_could_be_meant(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n,text\na,1,b\n")
    with pytest.raises(UnreadableFileError, match=r"a\.csv has several columns 'text'; give each"):
        read(tmp_path / "a.csv")
