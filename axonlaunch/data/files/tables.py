"""Reads rows of Parquet and Arrow files in batches that are bounded by bytes as well as by rows.

A small file can repeat one large value many times, or claim more values than it has bytes. Rows
that are too large, and files with impossible claims, are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

LARGEST_ROW = 1 << 28
"""Maximum bytes of a row; a tokenizer needs some hundred times as much memory as text."""
_BATCH_BYTES = 1 << 27
_BATCH_ROWS, _BATCH_ROWS_SHARED, _BATCH_ROWS_DELTA = 1024, 1 << 14, 16
_BLOCK = 1 << 20
_MANY_VALUES = 1 << 26
_RATIO = 500
"""Maximum ratio of decompressed to compressed bytes of a large column."""
_OBJECT_BYTES = 64
"""Size of a Python object without its content."""


class TooLargeRowError(ValueError):
    """A row is larger than the limit."""


class ParquetRows:
    """The rows of a Parquet file, in batches.

    Attributes:
        num_rows: Number of rows in the file.
    """

    def __init__(self, raw: BinaryIO, *, columns: Callable[[list[str]], list[str]]) -> None:
        """Read the metadata of the file's columns.

        Args:
            columns: Selects the names of the columns to read.
        """
        import pyarrow.parquet

        # By default the columns of a group of rows would be read at once.
        options = {"page_checksum_verification": True, "buffer_size": _BLOCK, "pre_buffer": False}
        self._raw = raw
        self._file = pyarrow.parquet.ParquetFile(raw, **options)
        self._about = self._file.metadata
        self.num_rows = self._about.num_rows
        self._names = columns(self._file.schema_arrow.names)
        schema = self._file.schema
        described = [schema.column(number) for number in range(len(schema))]
        lists = {column.path for column in described if column.max_repetition_level}
        self._widths = [column.length or 1 for column in described if self._is_read(column.path)]
        repeated = {
            column.path_in_schema
            for group in range(self._about.num_row_groups)
            for column in self._columns(group)
            if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page
        }
        # The number of values in a list row is unknown, so each value is kept once in memory.
        # Starting a batch is then slow, so batches are large; other files are read as plain values.
        self._shares_values = bool(repeated & lists)
        if self._shares_values:
            raw.seek(0)
            paths = sorted(repeated)
            self._file = pyarrow.parquet.ParquetFile(raw, read_dictionary=paths, **options)

    def batches(self, *, skip: int) -> Iterator[tuple[int, Any]]:
        """Yield (number of the first row, batch).

        Args:
            skip: Row groups that end at or before this row are skipped.

        Raises:
            ValueError: A row group claims more content than its bytes can have.
        """
        first = 1
        for group in range(self._about.num_row_groups):
            rows = self._about.row_group(group).num_rows
            if first + rows <= skip + 1:
                first += rows
                continue
            for column in self._columns(group):
                _refuse_bomb(column, number=group + 1)
            at_once = self._rows_at_once(group)
            for batch in self._file.iter_batches(at_once, row_groups=[group], columns=self._names):
                yield first, batch
                first += batch.num_rows

    def _rows_at_once(self, group: int) -> int:
        """Return the number of rows of a group to read at once.

        Values encoded as ``DELTA_BYTE_ARRAY`` may each repeat the previous value.
        """
        columns = [*self._columns(group)]
        if self._shares_values:
            full = sum(column.total_uncompressed_size for column in columns)
            each = full // max(1, self._about.row_group(group).num_rows)
            rows = min(_BATCH_ROWS_SHARED, _BATCH_BYTES // max(1, each))
        else:
            dictionaries = [_dictionary_bytes(self._raw, column) for column in columns]
            rows = min(_BATCH_ROWS, _BATCH_BYTES // max([1, *dictionaries]))
        rows = min(rows, _BATCH_BYTES // max([1, *self._widths]))
        if any("DELTA_BYTE_ARRAY" in column.encodings for column in columns):
            rows = min(rows, _BATCH_ROWS_DELTA)
        return max(1, int(rows))

    def _columns(self, group: int) -> Iterator[Any]:
        """Yield the metadata of the columns to read in a row group."""
        about = self._about.row_group(group)
        columns = (about.column(number) for number in range(about.num_columns))
        return (column for column in columns if self._is_read(column.path_in_schema))

    def _is_read(self, path: str) -> bool:
        return any(path == name or path.startswith(f"{name}.") for name in self._names)


def bounded_rows(first: int, batch: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of an Arrow batch, converting only a few MB to Python objects at once.

    Args:
        first: Number of the first row.
        batch: A record batch.

    Raises:
        TooLargeRowError: A row is larger than ``LARGEST_ROW``.
    """
    size = sum(map(_python_bytes, batch.columns))
    if size <= _BATCH_BYTES or batch.num_rows <= 1:
        if size > LARGEST_ROW:
            raise TooLargeRowError(f"row {first} holds more than {LARGEST_ROW >> 20} MiB; split it")
        yield from enumerate(_with_values(batch).to_pylist(), start=first)
        return
    half = batch.num_rows // 2
    yield from bounded_rows(first, batch.slice(0, half))
    yield from bounded_rows(first + half, batch.slice(half))


def _with_values(batch: Any) -> Any:
    """Replace indices of dictionaries by their values, because the indices convert slowly."""
    import pyarrow as arrow

    plain = arrow.schema([field.with_type(_value_type(field.type)) for field in batch.schema])
    if plain == batch.schema:
        return batch
    # A cast converts all values of a list, also those that a slice leaves out.
    return batch.take(arrow.array(range(batch.num_rows))).cast(plain)


def _value_type(kind: Any) -> Any:
    import pyarrow as arrow

    if arrow.types.is_dictionary(kind):
        return kind.value_type
    if arrow.types.is_struct(kind):
        return arrow.struct([field.with_type(_value_type(field.type)) for field in kind])
    if arrow.types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(_value_type(kind.value_type)))
    if arrow.types.is_large_list(kind):
        return arrow.large_list(kind.value_field.with_type(_value_type(kind.value_type)))
    return kind


def _python_bytes(array: Any) -> int:
    """Return the approximate bytes of a column as Python objects, without converting it."""
    import pyarrow as arrow
    import pyarrow.compute

    kind, count = array.type, len(array)
    if not count or arrow.types.is_null(kind):
        return 8 * count
    if isinstance(array, arrow.ExtensionArray):
        return _python_bytes(array.storage)
    if arrow.types.is_dictionary(kind):
        return _repeated_bytes(array)
    if arrow.types.is_struct(kind):
        return _OBJECT_BYTES * count + sum(map(_python_bytes, array.flatten()))
    if arrow.types.is_map(kind):
        array = array.cast(arrow.list_(arrow.struct([kind.key_field, kind.item_field])))
        return _python_bytes(array)
    if arrow.types.is_nested(kind):
        return _OBJECT_BYTES * count + (_python_bytes(array.flatten()) if _is_list(kind) else 0)
    if _has_lengths(kind):
        return _OBJECT_BYTES * count + (pyarrow.compute.sum(_lengths(array)).as_py() or 0)
    return (_OBJECT_BYTES + max(1, getattr(kind, "byte_width", 8) or 8)) * count


def _repeated_bytes(array: Any) -> int:
    """Return the bytes of a dictionary array's values, counting every repetition."""
    import pyarrow.compute

    values, count = array.dictionary, len(array)
    if not _has_lengths(values.type):
        largest = max((_python_bytes(values.slice(n, 1)) for n in range(len(values))), default=0)
        return (_OBJECT_BYTES + largest) * count
    lengths = _lengths(values).take(array.indices)
    return _OBJECT_BYTES * count + (pyarrow.compute.sum(lengths).as_py() or 0)


def _lengths(array: Any) -> Any:
    import pyarrow as arrow
    import pyarrow.compute

    return pyarrow.compute.binary_length(array).cast(arrow.int64())


def _has_lengths(kind: Any) -> bool:
    import pyarrow as arrow

    checks = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_binary)
    return any(is_kind(kind) for is_kind in (*checks, arrow.types.is_large_binary))


def _is_list(kind: Any) -> bool:
    import pyarrow as arrow

    checks = (arrow.types.is_list, arrow.types.is_large_list, arrow.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in checks)


def _dictionary_bytes(raw: Any, column: Any) -> int:
    """Return the decompressed size of a column's dictionary, from its page header; 0 without one.

    A page begins with three fields in Thrift's compact protocol: type, size and compressed size.
    Source: parquet.thrift, ``PageHeader``.
    """
    if not column.has_dictionary_page:
        return 0
    raw.seek(column.dictionary_page_offset)
    header = raw.read(32)
    numbers, at = [], 0
    for _ in range(2):
        if header[at : at + 1] != b"\x15":  # the next field, an i32
            return LARGEST_ROW
        number, shift, at = 0, 0, at + 1
        while at < len(header):
            number |= (header[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if header[at - 1] < 128:
                break
        numbers.append(number >> 1)
    return numbers[1]


def _refuse_bomb(column: Any, *, number: int) -> None:
    """Refuse a column of a row group that claims more content than its bytes can have.

    Raises:
        ValueError: The column claims more content than its bytes can have.
    """
    stored, full = column.total_compressed_size, column.total_uncompressed_size
    if full > LARGEST_ROW and full > _RATIO * stored:
        what = f"{full:,} bytes"
    elif column.num_values > _MANY_VALUES and column.num_values > 8 * full:
        what = f"{column.num_values:,} values"
    else:
        return
    column_name = f"column {column.path_in_schema} of row group {number}"
    raise ValueError(f"{column_name} claims {what} in {stored:,} bytes")
