"""Builds shards: reads, encodes and writes rows, and records the progress.

If the process ends early, the next one continues after the last recorded chunk. A file stays open
for the next shard, so a file that can only be read sequentially is read once.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from axonlaunch.data.files.rows import BadRow, Columns, Row, RowReader, UnreadableFileError
from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.shards import cached_folder
from axonlaunch.data.shards.encoding import Encoded, Encoder, OnProgress, Tokenizing
from axonlaunch.system.processes.isolated import IsolatedCallError
from axonlaunch.system.storage.files import appending_descriptor, replace_text

SHARD_SIZE = 16 << 20
"""Characters of text per shard. At a few MB per second the first shard is built while a model is
built, and it has enough rows to shuffle.
"""
META = "shard.json"
TOKENS_FILE, LENGTHS_FILE, ROWS_FILE, COUNTED_FILE = (
    "tokens.bin",
    "lengths.bin",
    "rows.bin",
    "counted.bin",
)
_PROGRESS = "progress.json"
_CHUNK_ROWS, _CHUNK_CHARACTERS = 1024, 1 << 20
_TUPLES = ("documents", "listed", "source_sums")
_LISTED = 5
"""Number of bad rows that are named; the others are only counted."""


@dataclass(frozen=True)
class Progress:
    """Progress of a shard.

    Attributes:
        file: Index of the current file in the shard's group of files.
        row: Number of the last row taken from this file.
        offset: Decompressed bytes of the file up to the end of that row; 0 for formats without
            lines.
        characters: Number of characters in the rows taken.
        documents: Number of documents from each file.
        tokens: Number of tokens.
        counted: Number of tokens that are targets.
        empty: Number of rows left out because no token is a target.
        bad: Number of invalid rows.
        listed: First invalid rows: ``"FILE, line N: reason"``.
        is_last: Whether the last file of the group was read to its end.
        sums: CRC-32 of the content written to each file of the shard, by name.
        source_sums: CRC-32 of the tokens from each file, in the order of ``documents``.
    """

    file: int = 0
    row: int = 0
    offset: int = 0
    characters: int = 0
    documents: tuple[int, ...] = (0,)
    tokens: int = 0
    counted: int = 0
    empty: int = 0
    bad: int = 0
    listed: tuple[str, ...] = ()
    is_last: bool = False
    sums: Mapping[str, int] = field(default_factory=dict)
    source_sums: tuple[int, ...] = (0,)

    @classmethod
    def behind(cls, other: Progress) -> Progress:
        """Return the initial progress of the shard that follows another one."""
        zeros = (0,) * (other.file + 1)
        start = cls(file=other.file, row=other.row, offset=other.offset)
        return replace(start, documents=zeros, source_sums=zeros)

    @classmethod
    def read(cls, file: Path) -> Progress:
        """Read the recorded progress.

        Raises:
            FileNotFoundError: There is no record.
            ValueError: The record is invalid; or ``TypeError`` or ``KeyError``.
        """
        content = json.loads(file.read_text())
        lists = {key: tuple(content[key]) for key in _TUPLES}
        return cls(**{**content, **lists})

    def at_next_file(self) -> Progress:
        """Return a copy at the beginning of the group's next file."""
        documents, sums = (*self.documents, 0), (*self.source_sums, 0)
        start = replace(self, file=self.file + 1, row=0, offset=0)
        return replace(start, documents=documents, source_sums=sums)

    def write(self, file: Path) -> None:
        """Record the progress in a file."""
        replace_text(file, json.dumps(asdict(self)))


class BadRowsError(ValueError):
    """There are invalid rows, and they are not skipped."""

    def __init__(self, progress: Progress) -> None:
        """Name the first invalid row."""
        others = progress.bad - 1
        more = f" (and {others} more row{'s' * (others > 1)} so far)" if others else ""
        super().__init__(f"{progress.listed[0]}{more}")


class EncodingError(ValueError):
    """A tokenizer or chat template exceeded its limits of time or memory."""


def token_dtype(encoder: Encoder) -> str:
    """Return the data type of stored tokens."""
    return "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"


def file_sizes(progress: Progress, encoder: Encoder) -> dict[str, int]:
    """Return the size in bytes of each file of a shard at some progress, by name."""
    documents = sum(progress.documents)
    return {
        TOKENS_FILE: np.dtype(token_dtype(encoder)).itemsize * progress.tokens,
        LENGTHS_FILE: 4 * documents,
        ROWS_FILE: 4 * documents,
        **({COUNTED_FILE: progress.tokens} if encoder.masks else {}),
    }


def is_written(partial: Path, progress: Progress, encoder: Encoder) -> bool:
    """Return whether the files of an unfinished shard match its recorded progress.

    Raises:
        OSError: One is a link or can't be read.
    """
    files = file_sizes(progress, encoder).items()
    sums = progress.sums
    return all(cached_folder.matches(partial / n, size=s, crc32=sums.get(n, 0)) for n, s in files)


def written_sums(partial: Path) -> Mapping[str, int]:
    """Return the checksums of the files of a shard that ``ShardMaker.make`` has finished."""
    return Progress.read(partial / META).sums


class ShardMaker:
    """Builds shards one after another."""

    def __init__(self, encoder: Encoder, *, skip_bad: bool) -> None:
        """Store the encoder of rows, and whether to leave out invalid rows."""
        self._encoder = encoder
        self._skip_bad = skip_bad
        self._open: _OpenFile | None = None

    def make(
        self, partial: Path, files: tuple[SourceFile, ...], start: Progress, report: OnProgress
    ) -> None:
        """Build the missing part of a shard, until it is full or the files end.

        Args:
            partial: The shard's folder, which no other process writes.
            files: Files of its group.
            start: Start of the shard.
            report: Called after each chunk.

        Raises:
            BadRowsError: A row is invalid, and such rows are not skipped.
            UnreadableFileError: A file can't be read, or has no rows and bad rows are not skipped.
            OSError: The folder can't be written.
        """
        try:
            progress = Progress.read(partial / _PROGRESS)
            # After a power failure the record may be on disk, but not the data.
            progress = progress if is_written(partial, progress, self._encoder) else start
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            progress = start
        self._refuse_bad(progress)
        with ExitStack() as stack:
            written = _Files(partial, self._encoder, progress, stack)
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="tokenizing"))
            stack.push(self._cancel)  # runs before the pool waits, so that Ctrl-C ends its call
            while True:
                progress = self._add_file(written, pool, files, progress, report)
                is_full = progress.characters >= SHARD_SIZE
                if not progress.row:
                    progress = self._without_rows(progress, files[progress.file])
                if is_full or progress.file == len(files) - 1:
                    break
                progress = progress.at_next_file()
        replace(progress, is_last=not is_full).write(partial / META)
        (partial / _PROGRESS).unlink(missing_ok=True)

    def _add_file(
        self,
        written: _Files,
        pool: ThreadPoolExecutor,
        files: tuple[SourceFile, ...],
        progress: Progress,
        report: OnProgress,
    ) -> Progress:
        """Add the remaining rows of a file until the shard is full."""
        source = files[progress.file]
        done_bytes, total = sum(f.size for f in files[: progress.file]), sum(f.size for f in files)
        # A reader that failed is not reused: its end would look like the end of the file.
        opened, self._open = self._open, None
        if opened is None or not opened.can_continue(source, progress):
            opened = _OpenFile(source, progress, self._encoder.columns)
        encoding: Future[_Encoding] | None = None
        pending: _Chunk | None = None
        # A chunk is encoded, without holding Python's lock, while the next one is read.
        for chunk in itertools.chain(opened.chunks(progress), [None]):
            submitted = None if chunk is None else pool.submit(_encode_chunk, chunk, self._encoder)
            if encoding is not None:
                done, encoded, bad = _result_of(encoding, pending, source.name, opened.reader.unit)
                location = f"{source.name}, {opened.reader.unit}"
                progress = written.add(progress, done, encoded, bad, location)
                self._refuse_bad(progress)
                fraction = (done_bytes + done.fraction * source.size) / max(1, total)
                report(Tokenizing(source.name, fraction, progress.tokens))
            encoding, pending = submitted, chunk
        self._open = opened
        return progress

    def _cancel(self, error: type[BaseException] | None, *_: object) -> None:
        """End an encoding call after an error, because its result is no longer needed."""
        if error is not None:
            self._encoder.cancel()

    def _without_rows(self, progress: Progress, source: SourceFile) -> Progress:
        """Return the progress with a file without rows counted as a bad row.

        Raises:
            UnreadableFileError: Bad rows are not skipped.
        """
        reason = f"{source.name} holds no rows"
        if not self._skip_bad:
            raise UnreadableFileError(reason)
        return replace(progress, bad=progress.bad + 1, listed=(*progress.listed, reason)[:_LISTED])

    def _refuse_bad(self, progress: Progress) -> None:
        if progress.bad and not self._skip_bad:
            raise BadRowsError(progress)


@dataclass(frozen=True)
class _Chunk:
    """Rows that are encoded together.

    Attributes:
        rows: Rows with their numbers.
        characters: Number of characters in the rows.
        offset: Offset of the reader after the last row.
        fraction: Fraction of the file up to there.
    """

    rows: list[tuple[int, Row | str | BadRow]]
    characters: int
    offset: int
    fraction: float


_Encoding = tuple[_Chunk, Encoded, list[tuple[int, str]]]


class _OpenFile:
    """A file that was read up to some row."""

    def __init__(self, source: SourceFile, progress: Progress, columns: Columns) -> None:
        self._source = source
        self._row = progress.row
        skip, offset = progress.row, progress.offset
        self.reader = RowReader(source, skip=skip, offset=offset, columns=columns)
        self._rows = iter(self.reader)

    def can_continue(self, source: SourceFile, progress: Progress) -> bool:
        """Return whether the rows after a progress are still unread."""
        return source == self._source and self._row <= progress.row

    def chunks(self, progress: Progress) -> Iterator[_Chunk]:
        """Yield the chunks after a progress, up to the row that fills the shard."""
        self.reader.skip = max(progress.row, self._source.after)
        read = progress.characters
        while read < SHARD_SIZE:
            rows: list[tuple[int, Row | str | BadRow]] = []
            size = 0
            for number, row in self._rows:
                rows.append((number, row))
                size += _characters(row)
                is_chunk = len(rows) >= _CHUNK_ROWS or size >= _CHUNK_CHARACTERS
                if is_chunk or read + size >= SHARD_SIZE:
                    break
            if not rows:
                return
            read += size
            self._row = rows[-1][0]
            yield _Chunk(rows, size, self.reader.offset, self.reader.fraction)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _result_of(
    encoding: Future[_Encoding], chunk: _Chunk | None, file: str, what: str
) -> _Encoding:
    """Return the encoded chunk.

    Raises:
        EncodingError: The tokenizer took too long, or too much memory.
    """
    try:
        return encoding.result()
    except IsolatedCallError as error:
        assert chunk is not None
        rows = f"{what}s {chunk.rows[0][0]:,} to {chunk.rows[-1][0]:,}"
        raise EncodingError(f"{error} ({file}, {rows})") from None


def _encode_chunk(chunk: _Chunk, encoder: Encoder) -> _Encoding:
    """Return a chunk, its documents with their rows' numbers, and (number, reason) of bad rows."""
    good = [(number, row) for number, row in chunk.rows if not isinstance(row, BadRow)]
    bad = [(number, row.reason) for number, row in chunk.rows if isinstance(row, BadRow)]
    encoded = encoder.encode([row for _, row in good])
    numbers = np.array([number for number, _ in good], dtype=np.int64)
    bad += [(good[index][0], reason) for index, reason in encoded.bad]
    return chunk, replace(encoded, rows=numbers[encoded.rows]), sorted(bad)


class _Files:
    """Open files of an unfinished shard."""

    def __init__(
        self, partial: Path, encoder: Encoder, progress: Progress, stack: ExitStack
    ) -> None:
        """Open the files and truncate them to the recorded progress."""
        self._progress_file = partial / _PROGRESS
        self._dtype = np.dtype(token_dtype(encoder))
        self._streams = {}
        for name, size in file_sizes(progress, encoder).items():
            descriptor = appending_descriptor(partial / name)
            stream = stack.enter_context(os.fdopen(descriptor, "ab"))
            stream.truncate(size)
            self._streams[name] = stream

    def add(
        self,
        progress: Progress,
        chunk: _Chunk,
        encoded: Encoded,
        bad: list[tuple[int, str]],
        location: str,
    ) -> Progress:
        """Write a chunk and record the progress."""
        written = {
            TOKENS_FILE: encoded.tokens.astype(self._dtype).tobytes(),
            LENGTHS_FILE: encoded.lengths.astype(np.uint32).tobytes(),
            ROWS_FILE: encoded.rows.astype(np.uint32).tobytes(),
        }
        counted = len(encoded.tokens) - len(encoded.lengths)
        if encoded.counted is not None:
            written[COUNTED_FILE] = encoded.counted.tobytes()
            counted = int(np.count_nonzero(encoded.counted))
        for name, content in written.items():
            self._streams[name].write(content)
            self._streams[name].flush()
        sums = {n: zlib.crc32(part, progress.sums.get(n, 0)) for n, part in written.items()}
        *previous, current = progress.documents
        *previous_sums, current_sum = progress.source_sums
        for content in written.values():
            current_sum = zlib.crc32(content, current_sum)
        listed = [f"{location} {number}: {reason}" for number, reason in bad]
        progress = replace(
            progress,
            row=chunk.rows[-1][0],
            offset=chunk.offset,
            characters=progress.characters + chunk.characters,
            documents=(*previous, current + len(encoded.lengths)),
            tokens=progress.tokens + len(encoded.tokens),
            counted=progress.counted + counted,
            empty=progress.empty + encoded.empty,
            bad=progress.bad + len(bad),
            listed=(*progress.listed, *listed)[:_LISTED],
            sums=sums,
            source_sums=(*previous_sums, current_sum),
        )
        progress.write(self._progress_file)
        return progress
