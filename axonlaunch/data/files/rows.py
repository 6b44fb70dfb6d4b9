"""Reads rows from JSON lines, JSON, CSV, Parquet, Arrow and text files, compressed or not.

An invalid row is returned as a ``BadRow`` with the reason. A truncated or unreadable file is an
error, because rows may be missing.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from axonlaunch.data.files import json_array, tables
from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.files.tables import LARGEST_ROW

Row = dict[str, Any]
Columns = Callable[[list[str]], list[str]]
"""Maps a table's column names to the columns to read."""
_AT_ONCE = 1024
"""Rows of a table that are converted to Python objects at once."""
_BLOCK = 1 << 20
"""Bytes per read."""
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Characters by which Python's ``surrogateescape`` replaces bytes that are not UTF-8."""
_PYARROW = "needs pyarrow; pip install 'axonlaunch[data]'"


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read.

    Attributes:
        reason: Why it is invalid.
    """

    reason: str


class UnreadableFileError(ValueError):
    """A file that can't be read to its end; the text says which, where and why."""


class RowReader:
    """Reads the rows of one file, in order.

    Attributes:
        fraction: Fraction of the file read so far, for progress bars.
        offset: Decompressed bytes up to the end of the last row; 0 for formats without lines.
        skip: Rows up to and including this number are skipped; may be raised while reading.
    """

    def __init__(
        self,
        source: SourceFile,
        *,
        skip: int = 0,
        offset: int = 0,
        columns: Columns | None = None,
        counts_only: bool = False,
    ) -> None:
        """Store the file and the start position.

        Args:
            skip: Rows up to and including this number are skipped.
            offset: Byte offset saved by an earlier reader after row ``skip``; reading starts there.
            columns: Selects the columns to read; None reads all.
            counts_only: Whether only the numbers of rows are used, so that lines are not parsed.
        """
        self.fraction = 0.0
        self.offset = offset
        self.skip = max(skip, source.after)
        self._source = source
        self._columns = _first_column if counts_only else columns or list
        self._counts_only = counts_only
        self._raw: BinaryIO | None = None

    def __iter__(self) -> Iterator[tuple[int, Row | str | BadRow]]:
        """Yield ``(number, row)``: a line number for line formats, the whole text of a text file.

        Raises:
            UnreadableFileError: The file is truncated, or does not have its format.
        """
        number = self.skip if self.offset else 0
        try:
            with ExitStack() as stack:
                self._raw = stack.enter_context(self._source.open())
                for number, row in self._rows(stack):
                    if self._source.last is not None and number > self._source.last:
                        break
                    if number > self.skip:
                        yield number, row
        except MemoryError:
            position = f" after {self.unit} {number}" if number else ""
            message = f"{self._source.name} can't be read{position}: not enough memory"
            raise UnreadableFileError(message) from None
        except Exception as error:
            if isinstance(error, UnreadableFileError) or not _is_due_to_file(error):
                raise
            position = f" after {self.unit} {number}" if number else ""
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"{self._source.name} can't be read{position}: {reason[:300]}"
            raise UnreadableFileError(message) from error
        self.fraction = 1.0

    def num_rows(self) -> int | None:
        """Return the number of rows from the metadata of a Parquet file; None for other formats.

        Raises:
            UnreadableFileError: The file can't be read.
        """
        if self._source.format != ".parquet":
            return None
        _pyarrow()
        try:
            with self._source.open() as raw:
                count = int(tables.ParquetRows(raw, columns=list).num_rows)
        except Exception as error:
            if not _is_due_to_file(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UnreadableFileError(f"{self._source.name} can't be read: {reason}") from error
        last = count if self._source.last is None else min(count, self._source.last)
        return max(0, last - self._source.after)

    @property
    def unit(self) -> str:
        """Unit of the numbers: line or row."""
        is_text = self._source.format in (".jsonl", ".ndjson", ".csv", ".tsv")
        return "line" if is_text else "row"

    def _rows(self, stack: ExitStack) -> Iterator[tuple[int, Row | str | BadRow]]:
        form = self._source.format
        if form in (".parquet", ".arrow"):
            yield from self._read_tables(form)
            return
        stream = self._open_decompressed(stack)
        if form in (".csv", ".tsv"):
            yield from self._read_csv(stream, "\t" if form == ".tsv" else ",")
        elif form == ".txt":
            content = stream.read(LARGEST_ROW + 1)
            _refuse_long(content, "it is one document, and")
            yield 1, _text(content)
        elif form == ".json" and _begins_array(stream):
            yield from self._read_array(json_array.elements(stream, longest=LARGEST_ROW))
        else:
            yield from self._read_lines(stream)

    def _open_decompressed(self, stack: ExitStack) -> io.BufferedReader:
        raw, compression = self._raw, self._source.compression
        assert raw is not None
        opened: Any = raw
        if compression == ".gz":
            opened = gzip.GzipFile(fileobj=raw)
        elif compression == ".bz2":
            opened = bz2.BZ2File(raw)
        elif compression == ".xz":
            opened = lzma.open(raw)  # noqa: SIM115 - closed with the buffer around it
        elif compression == ".zst":
            # Unlike zstandard's stream, this one reports truncated files.
            arrow = _pyarrow()
            opened = arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), "zstd")
        return cast("io.BufferedReader", stack.enter_context(io.BufferedReader(opened, _BLOCK)))

    def _read_lines(self, stream: io.BufferedReader) -> Iterator[tuple[int, Row | BadRow]]:
        first = 1
        if self.offset:
            self._skip_to_offset(stream)
            first += self.skip
        for number in itertools.count(first):
            if not (line := stream.readline(LARGEST_ROW + 1)):
                return
            _refuse_long(line, f"line {number}")
            self.offset += len(line)
            if number % 256 == 0:
                self._note_position()
            if number <= self.skip or not line.strip():
                continue
            if self._counts_only:
                yield number, {}
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                yield number, BadRow(f"is not UTF-8 ({error.reason} at byte {error.start})")
            except (ValueError, RecursionError) as error:
                yield number, BadRow(f"is not JSON ({error})")
            else:
                yield number, row if isinstance(row, dict) else _no_object(row)

    def _skip_to_offset(self, stream: io.BufferedReader) -> None:
        """Skip the content before the offset."""
        if not self._source.compression:
            stream.seek(self.offset)
            return
        left = self.offset
        while left and (block := stream.read(min(left, _BLOCK))):
            left -= len(block)
            self._note_position()

    def _read_array(self, content: Iterator[Any]) -> Iterator[tuple[int, Row | BadRow]]:
        for number, row in enumerate(content, start=1):
            self._note_position()
            yield number, row if isinstance(row, dict) else _no_object(row)

    def _read_csv(
        self, stream: io.BufferedReader, delimiter: str
    ) -> Iterator[tuple[int, Row | BadRow]]:
        csv.field_size_limit(LARGEST_ROW)  # documents may exceed Python's default limit
        decoded = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        with decoded as text:
            rows = csv.DictReader(_bounded_lines(text), delimiter=delimiter, strict=True)
            names = list(rows.fieldnames or ())
            if twice := [name for name in names if names.count(name) > 1]:
                message = f"{self._source.name} has several columns {twice[0]!r}; give each a name"
                raise UnreadableFileError(message)
            for row in rows:
                self._note_position()
                number = rows.line_num
                if self._counts_only:
                    yield number, {}
                else:
                    yield number, _check_row(row, columns=len(rows.fieldnames or ()))

    def _read_tables(self, form: str) -> Iterator[tuple[int, Row | BadRow]]:
        for first, batch in self._tables(form):
            if first + batch.num_rows > self.skip + 1:
                yield from tables.bounded_rows(first, batch)

    def _tables(self, form: str) -> Iterator[tuple[int, Any]]:
        """Yield Arrow batches of a file, each with the number of its first row."""
        arrow = _pyarrow()
        if form == ".parquet":
            assert self._raw is not None
            file = tables.ParquetRows(self._raw, columns=self._columns)
            for first, batch in file.batches(skip=self.skip):
                yield first, batch
                self.fraction = (first + batch.num_rows - 1) / max(1, file.num_rows)
            return
        import pyarrow.ipc

        try:
            reader = pyarrow.ipc.open_stream(self._raw)
        except arrow.ArrowInvalid:
            assert self._raw is not None
            self._raw.seek(0)
            file = pyarrow.ipc.open_file(self._raw)
            reader = (file.get_batch(index) for index in range(file.num_record_batches))
        first = 1
        for batch in reader:
            batch = batch.select(self._columns(batch.schema.names))
            batch.validate(full=True)  # offsets of an untrusted file may be out of bounds
            for start in range(0, batch.num_rows, _AT_ONCE):
                yield first + start, batch.slice(start, _AT_ONCE)
            first += batch.num_rows
            self._note_position()

    def _note_position(self) -> None:
        assert self._raw is not None
        self.fraction = min(1.0, self._raw.tell() / max(1, self._source.size))


def _first_column(names: list[str]) -> list[str]:
    return names[:1]


def _is_due_to_file(error: Exception) -> bool:
    """Return whether an error is due to the file's content, including pyarrow's errors."""
    classes = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError, csv.Error, RecursionError)
    return isinstance(error, classes) or type(error).__module__ == "pyarrow.lib"


def _refuse_long(content: bytes | str, what: str) -> None:
    """Refuse a row above the size limit.

    Raises:
        ValueError: The row is larger.
    """
    if len(content) > LARGEST_ROW:
        raise ValueError(f"{what} holds more than {LARGEST_ROW >> 20} MiB; split it")


def _bounded_lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines of a text.

    Raises:
        ValueError: A line is longer than the size limit of a row.
    """
    for number in itertools.count(1):
        if not (line := text.readline(LARGEST_ROW + 1)):
            return
        _refuse_long(line, f"line {number}")
        yield line


def _text(content: bytes) -> str | BadRow:
    """Return the text of a file, or why it is invalid."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(
            f"is not UTF-8 ({error.reason} at byte {error.start}); convert it, as in "
            "iconv -f LATIN1 -t UTF-8"
        )


def _begins_array(stream: io.BufferedReader) -> bool:
    return stream.peek(1 << 10).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _no_object(row: Any) -> BadRow:
    return BadRow(f"is {type(row).__name__}, not an object with fields")


def _check_row(row: dict[Any, Any], *, columns: int) -> Row | BadRow:
    """Return a row of CSV, or why it is invalid."""
    if None in row:
        return BadRow(f"has {columns + len(row[None])} columns, and the header {columns}")
    if missing := [name for name, value in row.items() if value is None]:
        return BadRow(f"ends before its column {missing[0]}")
    if any(_NOT_UTF8.search(value) for value in row.values()):
        return BadRow("is not UTF-8")
    return row


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UnreadableFileError(_PYARROW) from None
    return pyarrow
