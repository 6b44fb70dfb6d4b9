"""Tokens of files, made once and memory-mapped from then on.

A shard holds the tokens of some files; its name is a hash of the files, the tokenizer and the
options. It is complete or not there: until then it is a folder ``NAME.partial``, which the next
process continues, and which is locked by the one that writes.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.data.encoding import Encoded, Encoder, OnProgress, Tokenising
from axonlaunch.data.rows import BadRow, Row, RowReader, UnreadableFileError
from axonlaunch.data.sources import SourceFile
from axonlaunch.system.cache import cache_folder
from axonlaunch.system.files import replace_text

_FORMAT = 1
"""Of what is in a shard; another one is never read, for its name has this in it."""
_META, _PROGRESS = "shard.json", "progress.json"
_TOKENS, _LENGTHS, _ROWS, _COUNTED = "tokens.bin", "lengths.bin", "rows.bin", "counted.bin"
_SMALL = 64 << 20
"""Bytes of files that share a shard: as many folders as files would be too many."""
_CHUNK_ROWS, _CHUNK_CHARACTERS = 1024, 1 << 20
_OPEN_SHARDS = 256
_LISTED = 5
"""Bad rows that are remembered by name; the others are counted."""


@dataclass(frozen=True)
class Progress:
    """How far a shard is.

    Attributes:
        file: The file that is read, by its place in the shard.
        row: The last row of it that was taken.
        documents: How many there are, of each file.
        tokens: How many there are.
        empty: Rows of which no token is a target, and which are left out.
        bad: Rows that are none.
        listed: The first of them: ``"FILE, line N: reason"``.
    """

    file: int = 0
    row: int = 0
    documents: tuple[int, ...] = ()
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    listed: tuple[str, ...] = ()


class BadRowsError(ValueError):
    """A row is none, and none is to be skipped."""


@dataclass(frozen=True)
class Shard:
    """The tokens of some files.

    Attributes:
        folder: Where they are.
        files: Names of the files.
        progress: At the end.
        dtype: Of a token.
        lengths: Tokens of each document, [documents].
        rows: Row of its file that each document is, [documents].
        masks: Whether some tokens don't count.
        made: When its folder was: a shard that is made again is mapped again.
    """

    folder: Path
    files: tuple[str, ...]
    progress: Progress
    dtype: str
    masks: bool
    made: int
    lengths: npt.NDArray[np.uint32] = field(repr=False)
    rows: npt.NDArray[np.uint32] = field(repr=False)

    def tokens(self) -> npt.NDArray[Any]:
        """Return all tokens, memory-mapped."""
        return _mapped(str(self.folder / _TOKENS), self.dtype, self.made)

    def counted(self) -> npt.NDArray[Any] | None:
        """Return for each token whether it counts; None: all do."""
        if not self.masks:
            return None
        return _mapped(str(self.folder / _COUNTED), "uint8", self.made)

    def place(self, document: int) -> str:
        """Return the file and the row of a document."""
        ends = list(itertools.accumulate(self.progress.documents))
        file = next(index for index, end in enumerate(ends) if document < end)
        return f"{self.files[file]}, row {int(self.rows[document])}"


def folder_of(cache_dir: str | None) -> Path:
    """Return the folder that tokens are kept in; None: one of the user's cache."""
    return cache_folder() / "tokens" if cache_dir is None else Path(cache_dir).expanduser()


def shards(
    sources: Sequence[SourceFile],
    encoder: Encoder,
    *,
    folder: Path,
    skip_bad: bool,
    report: OnProgress,
) -> Iterator[Shard]:
    """Yield the shards of files, in order; what is not there yet is made.

    Args:
        sources: The files.
        encoder: Makes documents of their rows.
        folder: Where shards are kept.
        skip_bad: Whether rows that are none are left out.
        report: Is called now and then.

    Raises:
        BadRowsError: A row is none.
        UnreadableFileError: A file can't be read to its end.
        OSError: The folder can't be written.
    """
    total, before = max(1, sum(source.size for source in sources)), 0
    for group in groups(sources):
        size = sum(source.size for source in group)
        scaled = functools.partial(_scaled, report, before=before / total, share=size / total)
        shard = _shard(group, encoder, folder=folder, skip_bad=skip_bad, report=scaled)
        if shard.progress.bad and not skip_bad:
            raise _bad_rows(shard.progress)
        yield shard
        before += size


def _scaled(report: OnProgress, state: Tokenising, *, before: float, share: float) -> None:
    report(replace(state, fraction=before + share * state.fraction))


def groups(sources: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, ...]]:
    """Yield the files that share a shard, in order."""
    group: list[SourceFile] = []
    for source in sources:
        group.append(source)
        if sum(file.size for file in group) >= _SMALL:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def _shard(
    group: tuple[SourceFile, ...],
    encoder: Encoder,
    *,
    folder: Path,
    skip_bad: bool,
    report: OnProgress,
) -> Shard:
    named = [[file.name, file.size, file.stamp] for file in group]
    text = json.dumps([_FORMAT, encoder.fingerprint, named])
    complete = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    while (shard := _opened(complete, group, encoder)) is None:
        partial = complete.with_name(f"{complete.name}.partial")
        waits = functools.partial(report, Tokenising(group[0].name, 0.0, waits=True))
        with locked(partial, waits=waits) as is_current:
            if not is_current or complete.exists():
                continue  # another process has completed it
            _write(partial, group, encoder, skip_bad=skip_bad, report=report)
            partial.rename(complete)
    return shard


def _opened(folder: Path, group: tuple[SourceFile, ...], encoder: Encoder) -> Shard | None:
    """Return a shard that is complete; None where it is not there, or was damaged and is gone."""
    if not folder.is_dir():
        return None
    dtype = _dtype(encoder)
    try:
        progress = _progress(folder / _META)
        lengths = np.fromfile(folder / _LENGTHS, dtype=np.uint32)
        rows = np.fromfile(folder / _ROWS, dtype=np.uint32)
        sizes = [(_TOKENS, np.dtype(dtype).itemsize), *([(_COUNTED, 1)] if encoder.masks else [])]
        is_whole = len(lengths) == len(rows) == sum(progress.documents) and all(
            (folder / name).stat().st_size == width * progress.tokens for name, width in sizes
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        is_whole = False
    if not is_whole:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    names = tuple(source.name for source in group)
    made = folder.stat().st_ctime_ns
    return Shard(folder, names, progress, dtype, encoder.masks, made, lengths, rows)


@contextmanager
def locked(partial: Path, *, waits: Callable[[], None]) -> Iterator[bool]:
    """Hold a folder, made if it is not there; give whether it still is what others would find.

    The kernel lets go of it however a process ends.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield _is_same(lock, partial)
    finally:
        os.close(lock)


def _is_same(descriptor: int, path: Path) -> bool:
    """Say whether a path still leads to what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write(
    partial: Path,
    group: tuple[SourceFile, ...],
    encoder: Encoder,
    *,
    skip_bad: bool,
    report: OnProgress,
) -> None:
    """Make what is missing of a shard; however this ends, what was made is continued from."""
    try:
        progress = _progress(partial / _PROGRESS)
    except (FileNotFoundError, ValueError, TypeError):
        progress = Progress()
    if progress.bad and not skip_bad:
        raise _bad_rows(progress)
    with ExitStack() as stack:
        files = _Files(partial, encoder, progress, stack)
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="tokenising"))
        for index, source in enumerate(group):
            if index < progress.file:
                continue
            skip = progress.row if index == progress.file else 0
            if len(progress.documents) <= index:
                progress = replace(progress, file=index, row=0, documents=(*progress.documents, 0))
            reader = RowReader(source, skip=skip)
            # A chunk is encoded, outside of Python's lock, while the next one is read.
            chunks = ((chunk, reader.fraction) for chunk in _chunks(reader))
            encoding = None
            for chunk, fraction in itertools.chain(chunks, [(None, 1.0)]):
                after = None if chunk is None else pool.submit(_encoded, chunk, encoder)
                if encoding is not None:
                    progress = files.add(progress, *encoding.result(), source, reader.what)
                    if progress.bad and not skip_bad:
                        raise _bad_rows(progress)
                encoding = after
                done = (index + fraction) / len(group)
                report(Tokenising(source.name, done, progress.tokens))
            if not progress.row:
                raise UnreadableFileError(f"{source.name} holds no rows")
    replace_text(partial / _META, json.dumps(asdict(progress)))
    (partial / _PROGRESS).unlink(missing_ok=True)


_Chunk = list[tuple[int, Row | str | BadRow]]


def _chunks(reader: RowReader) -> Iterator[_Chunk]:
    chunk: _Chunk = []
    size = 0
    for number, row in reader:
        chunk.append((number, row))
        size += _characters(row)
        if len(chunk) >= _CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _encoded(chunk: _Chunk, encoder: Encoder) -> tuple[_Chunk, Encoded, list[tuple[int, str]]]:
    """Return a chunk, its documents with their rows' numbers, and what is wrong by number."""
    good = [(number, row) for number, row in chunk if not isinstance(row, BadRow)]
    bad = [(number, row.reason) for number, row in chunk if isinstance(row, BadRow)]
    encoded = encoder.encode([row for _, row in good])
    numbers = np.array([number for number, _ in good], dtype=np.int64)
    bad += [(good[place][0], reason) for place, reason in encoded.bad]
    return chunk, replace(encoded, rows=numbers[encoded.rows]), sorted(bad)


class _Files:
    """The files of a shard that is made."""

    def __init__(
        self, partial: Path, encoder: Encoder, progress: Progress, stack: ExitStack
    ) -> None:
        """Open them where the progress that is on record ends."""
        self._progress_file = partial / _PROGRESS
        self._dtype = np.dtype(_dtype(encoder))
        documents = sum(progress.documents)
        sizes = {
            _TOKENS: progress.tokens * self._dtype.itemsize,
            _LENGTHS: documents * 4,
            _ROWS: documents * 4,
            **({_COUNTED: progress.tokens} if encoder.masks else {}),
        }
        self._streams = {}
        for name, size in sizes.items():
            stream = stack.enter_context((partial / name).open("ab"))
            if stream.tell() < size:
                raise OSError(
                    f"{partial / name} is shorter than {_PROGRESS} says; delete {partial}"
                )
            stream.truncate(size)
            self._streams[name] = stream

    def add(
        self,
        progress: Progress,
        chunk: _Chunk,
        encoded: Encoded,
        bad: list[tuple[int, str]],
        source: SourceFile,
        what: str,
    ) -> Progress:
        """Write a chunk and put on record that it is written."""
        self._streams[_TOKENS].write(encoded.tokens.astype(self._dtype).tobytes())
        self._streams[_LENGTHS].write(encoded.lengths.astype(np.uint32).tobytes())
        self._streams[_ROWS].write(encoded.rows.astype(np.uint32).tobytes())
        if encoded.counted is not None:
            self._streams[_COUNTED].write(encoded.counted.tobytes())
        for stream in self._streams.values():
            stream.flush()
        *before, here = progress.documents
        listed = [f"{source.name}, {what} {number}: {reason}" for number, reason in bad]
        progress = replace(
            progress,
            row=chunk[-1][0],
            documents=(*before, here + len(encoded.lengths)),
            tokens=progress.tokens + len(encoded.tokens),
            empty=progress.empty + encoded.empty,
            bad=progress.bad + len(bad),
            listed=(*progress.listed, *listed)[:_LISTED],
        )
        replace_text(self._progress_file, json.dumps(asdict(progress)))
        return progress


def _progress(file: Path) -> Progress:
    content = json.loads(file.read_text())
    lists = {key: tuple(content[key]) for key in ("documents", "listed")}
    return Progress(**{**content, **lists})


def _bad_rows(progress: Progress) -> BadRowsError:
    more = f" (and {progress.bad - 1} more so far)" if progress.bad > 1 else ""
    return BadRowsError(f"{progress.listed[0]}{more}")


def _dtype(encoder: Encoder) -> str:
    return "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _mapped(file: str, dtype: str, made: int) -> npt.NDArray[Any]:
    del made  # of a shard in whose place another one may be by now
    if not os.stat(file).st_size:  # noqa: PTH116 - and nothing can be mapped of nothing
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
