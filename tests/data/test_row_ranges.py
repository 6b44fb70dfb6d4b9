"""Parts of splits and limits: the rows that ``datasets`` selects, in every format of files."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from axonlaunch.config.values.split_text import SplitSlice, parse_splits
from axonlaunch.data.files import row_ranges
from axonlaunch.data.files.row_ranges import count_all_rows, take_rows
from axonlaunch.data.files.rows import BadRow, RowReader, UnreadableFileError
from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.selection.file_selection import FileSelection

TEXTS = [f"row {number}\nof two lines" for number in range(23)]


def write(folder: Path, form: str, texts: list[str]) -> Path:
    """Write a file with a field ``text``; lines of JSON have blank lines between them."""
    path = folder / f"rows{form}"
    rows = [{"text": text} for text in texts]
    if form in (".jsonl", ".jsonl.gz"):
        content = "\n\n".join(map(json.dumps, rows)) + "\n\n"
        path.write_bytes(
            gzip.compress(content.encode()) if form.endswith("gz") else content.encode()
        )
    elif form == ".json":
        path.write_text(json.dumps(rows))
    elif form == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist(rows)
        if form == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path, row_group_size=5)
        else:
            with arrow.ipc.new_stream(path, table.schema) as stream:
                for batch in table.to_batches(max_chunksize=4):
                    stream.write_batch(batch)
    return path


def texts_of(sources: list[SourceFile]) -> list[Any]:
    rows = [row for source in sources for _, row in RowReader(source)]
    return [row["text"] if isinstance(row, dict) else row for row in rows]


FORMS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".arrow")


@pytest.mark.parametrize("form", FORMS)
def test_ranges_over_files_select_rows_of_each_format(form: str, tmp_path: Path) -> None:
    for name, texts in (("a", TEXTS[:10]), ("b", TEXTS[10:])):
        (tmp_path / name).mkdir()
        write(tmp_path / name, form, texts)
    sources = FileSelection([str(tmp_path / name / f"rows{form}") for name in "ab"]).sources()
    assert count_all_rows(sources) == 23
    for start, stop in [(0, 23), (0, 10), (0, 7), (9, 11), (12, 20), (10, 23), (22, 99), (5, 5)]:
        assert texts_of(take_rows(sources, start, stop)) == TEXTS[start:stop]
    inner = take_rows(sources, 4, 20)  # a part of a part
    assert count_all_rows(inner) == 16
    assert texts_of(take_rows(inner, 3, 14)) == TEXTS[7:18]


def test_whole_files_keep_their_identity(tmp_path: Path) -> None:
    """Tokens in the cache stay valid."""
    sources = FileSelection([str(write(tmp_path, ".jsonl", TEXTS))]).sources()
    assert take_rows(sources, 0, 23) == take_rows(sources, 0, 99) == sources


def test_limit_reads_no_further_than_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    full = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS * 4000).encode())
    path.write_bytes(full[: len(full) // 2])
    [source] = FileSelection([str(path)], limit=5).sources()
    assert texts_of([source]) == TEXTS[:5]
    with pytest.raises(UnreadableFileError):
        count_all_rows([source, *FileSelection([str(path)]).sources()])


def test_rows_of_a_large_file_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_ranges, "_LARGE", 0)
    path = write(tmp_path, ".csv", TEXTS)

    def selected() -> list[Any]:
        row_ranges.count_rows.cache_clear()
        sources = FileSelection([str(path)]).sources()
        return texts_of(take_rows(sources, 3, count_all_rows(sources) - 1))

    assert selected() == TEXTS[3:22]
    opened = []
    monkeypatch.setattr(RowReader, "__iter__", lambda self: opened.append(self) or iter(()))
    assert row_ranges.count_rows.__wrapped__(FileSelection([str(path)]).sources()[0]) == 23
    assert not opened
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_ranges, "_LARGE", 0)
    write(tmp_path, ".csv", TEXTS[:9])  # changed: another size and time
    assert selected() == TEXTS[3:8]


def test_invalid_rows_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{broken\n{"text": "b"}\n{"text": "c"}\n')
    first, bad, second = texts_of(FileSelection([str(path)], limit=3).sources())
    assert (first, second) == ("a", "b")
    assert isinstance(bad, BadRow)


SLICES = [
    *("train", "train[:7]", "train[5:]", "train[-4:]", "train[:-4]", "train[3:9]", "train[30:40]"),
    *("train[:10%]", "train[35%:]", "train[-20%:]", "train[10%:55%]", "train[:100%]", "train[9:3]"),
]


@pytest.mark.parametrize("text", SLICES)
@pytest.mark.parametrize("num_rows", [1, 23, 1000])
def test_bounds_are_those_of_datasets(text: str, num_rows: int) -> None:
    datasets = pytest.importorskip("datasets")
    [of_datasets] = datasets.ReadInstruction.from_spec(text).to_absolute({"train": num_rows})
    [ours] = parse_splits(text)
    assert ours.bounds(num_rows) == (of_datasets.from_, of_datasets.to)


def test_joined_splits_are_parsed() -> None:
    assert parse_splits("train[:50%] + test") == [
        SplitSlice("train", None, 50, True),
        SplitSlice("test"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no split; write train"),
        ("train[", r"'train\[' is no split"),
        ("train[1]", "is no split"),
        ("train[:5.5%]", "is no split"),
        ("train[:200%]", "more than 100%"),
        ("train[10%:20]", "a percentage and a row"),
        ("train+", "is no split"),
    ],
)
def test_invalid_split_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_splits(text)
