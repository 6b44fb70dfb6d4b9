"""Small or sparse files that would take gigabytes are read in bounded memory, or refused."""

from __future__ import annotations

import gzip
import io
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axonlaunch.cli import app
from axonlaunch.config import ConfigError
from axonlaunch.config.options.data import TextConfig
from axonlaunch.data.files import json_array, rows, tables
from axonlaunch.data.files.rows import BadRow, RowReader, UnreadableFileError
from axonlaunch.data.included.text import Text
from axonlaunch.data.selection.file_selection import FileSelection

arrow: Any = pytest.importorskip("pyarrow")
MIB = 1 << 20


def read(file: Path) -> list[Any]:
    [source] = FileSelection([str(file)]).sources()
    return [row for _, row in RowReader(source)]


def grown_by(work: Callable[[], object]) -> int:
    """Return the growth in bytes of this process's peak memory."""
    initial_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial_kib) << 10


def write_parquet(file: Path, table: Any, **options: Any) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        table, file, compression="zstd", store_schema=False, write_statistics=False, **options
    )


def repeated(count: int, size: int) -> Any:
    """Return a column of one large text, written once."""
    return arrow.DictionaryArray.from_arrays(arrow.array([0] * count, arrow.int32()), ["a" * size])


@pytest.mark.parametrize("is_list", [False, True])
def test_a_parquet_file_that_repeats_a_large_value_is_read_in_bounded_memory(
    is_list: bool, tmp_path: Path
) -> None:
    column = repeated(1000, 4 * MIB)
    if is_list:
        column = arrow.ListArray.from_arrays(list(range(0, 1001, 10)), column)
    file = tmp_path / "a.parquet"
    write_parquet(file, arrow.table({"text": column}))
    assert file.stat().st_size < 2000
    num_rows = 0

    def read_some() -> None:
        nonlocal num_rows
        for _, row in RowReader(FileSelection([str(file)]).sources()[0]):
            assert isinstance(row, dict)
            num_rows += 1
            if num_rows == 40:
                return

    assert grown_by(read_some) < 1000 * MIB
    assert num_rows == 40


def test_a_row_of_a_table_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    values = repeated(100_000, MIB)
    write_parquet(
        tmp_path / "a.parquet",
        arrow.table({"text": arrow.ListArray.from_arrays([0, 100_000], values)}),
    )
    with pytest.raises(UnreadableFileError, match="row 1 holds more than 256 MiB; split it"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["null", "dictionary"])
def test_an_arrow_file_that_claims_more_values_than_it_has_bytes_is_an_error(
    kind: str, tmp_path: Path
) -> None:
    import pyarrow.ipc

    count = 100_000_000
    values: Any = arrow.nulls(count)
    if kind == "dictionary":
        count = 1000
        values = repeated(count, MIB)
    column = arrow.LargeListArray.from_arrays([0, count], values)
    table = arrow.table({"text": column})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UnreadableFileError, match="row 1 holds more than 256 MiB"):
        read(tmp_path / "a.arrow")


@pytest.mark.slow
def test_a_parquet_column_that_claims_many_values_in_few_bytes_is_refused(tmp_path: Path) -> None:
    column = arrow.ListArray.from_arrays([0, 70_000_000], arrow.nulls(70_000_000, arrow.string()))
    write_parquet(tmp_path / "a.parquet", arrow.table({"text": column}))
    with pytest.raises(UnreadableFileError, match="claims 70,000,000 values in"):
        read(tmp_path / "a.parquet")


def test_offsets_of_an_arrow_file_that_lead_out_of_it_are_refused(tmp_path: Path) -> None:
    import pyarrow.ipc

    table = arrow.table({"text": ["a" * 77]})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "a.arrow").read_bytes()
    offsets = [bytes(4) + size.to_bytes(4, "little") for size in (77, 1 << 30)]
    head, _, after = content.rpartition(offsets[0])
    (tmp_path / "a.arrow").write_bytes(head + offsets[1] + after)
    with pytest.raises(UnreadableFileError, match="out of bounds: 1073741824"):
        read(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("name", "begins", "message"),
    [
        ("a.txt", b"", "it is one document, and holds more than 1 MiB"),
        ("a.json", b"[", "row 1 is not JSON"),
        ("a.json", b'[{"text": "', "row 1 is not JSON: Invalid control character"),
        ("a.jsonl", b"", "line 1 holds more than 1 MiB"),
        ("a.csv", b"text\n", "line 2 holds more than 1 MiB"),
    ],
)
def test_a_sparse_file_is_refused_before_it_is_read_whole(
    name: str, begins: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LARGEST_ROW", MIB)
    with (tmp_path / name).open("wb") as stream:
        stream.write(begins)
        stream.truncate(64 << 30)
    with pytest.raises(UnreadableFileError, match=message):
        read(tmp_path / name)


def test_a_compressed_line_of_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LARGEST_ROW", MIB)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(50 * MIB)))
    with pytest.raises(UnreadableFileError, match="line 1 holds more than 1 MiB"):
        read(tmp_path / "a.jsonl.gz")


ARRAYS: list[Any] = [
    [],
    [{"a": '[1, 2]\\" ü'}, 12, "text", [], None, 1.5e-7, {"b": {"c": [True, False]}}],
    [{"number": n, "text": "x" * (n % 50)} for n in range(300)],
]


@pytest.mark.parametrize("block", [1, 3, 64, 1 << 20])
@pytest.mark.parametrize("value", ARRAYS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_json_array_is_read_element_by_element_as_json_reads_it_whole(
    encoding: str, value: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_BLOCK", block)
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False) + "\n "):
        stream = io.BufferedReader(io.BytesIO(text.encode(encoding)))  # type: ignore[arg-type]
        assert [*json_array.elements(stream, longest=10_000)] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": }]', "row 2 is not JSON: Expecting value at its character 7"),
        ('[{"a": 1} {"a": 2}]', "expected ',' after row 1, found '{'"),
        ('[{"a": 1}, {"a"', "row 2 is not JSON"),
        ('[{"a": 1}', "expected ',' after row 1, found the end of the file"),
        ("[1] 2", "'2' follows the end of the array"),
        ('["' + "x" * 5000, "row 1 has more than 1,000 characters"),
    ],
)
def test_json_array_errors_are_named(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_BLOCK", 100)
    stream = io.BufferedReader(io.BytesIO(text.encode()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        list(json_array.elements(stream, longest=1000))


def test_a_column_s_size_as_python_objects_counts_repeated_values() -> None:
    plain = arrow.RecordBatch.from_pydict({"text": ["a" * 1000] * 10})
    shared = arrow.RecordBatch.from_arrays([repeated(10, 1000)], names=["text"])
    for batch in (plain, shared):
        assert 10_000 < tables._python_bytes(batch.column(0)) < 12_000
        assert [row for _, row in tables.bounded_rows(1, batch)] == plain.to_pylist()


def test_bytes_of_a_sparse_text_file_are_refused_by_their_beginning(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is not text, it has NUL bytes"):
        Text(TextConfig(files=[str(tmp_path / "a.txt")]))


def test_text_files_larger_than_memory_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as stream:
        stream.write(b"a" * (2 * MIB))
        stream.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"take 2\S* TiB of memory|take 2,\d+ GiB|of memory, and"):
        Text(TextConfig(files=[str(tmp_path / "a.txt")]))


def test_no_memory_while_rows_are_read_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3)

    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(rows.json, "loads", fail)
    with pytest.raises(UnreadableFileError, match="not enough memory"):
        read(tmp_path / "a.jsonl")


def test_no_memory_in_a_command_is_an_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**options: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr(sys, "argv", ["axonlaunch"])
    with pytest.raises(SystemExit) as ended:
        app.run_command()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(
        "error: there was not enough memory: Unable to allocate 9 GiB; free some"
    )


def test_a_bad_row_of_an_array_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, 5]')
    assert [isinstance(row, BadRow) for row in read(tmp_path / "a.json")] == [False, True]
