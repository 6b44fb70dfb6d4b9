"""Tokens of files, made once and memory-mapped from then on.

A corpus is a sequence of shards of some 16 MB of text; a large file has several, small ones share
them. The name of a shard is a hash of the files, where it begins, the tokenizer and the options. It
is complete or not there: until then it is a folder ``NAME.partial``, which the next process
continues, and which is locked by the one that writes.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.data import shard_maker
from axonlaunch.data.encoding import Encoder, OnProgress, Tokenising
from axonlaunch.data.shard_maker import (
    COUNTED_FILE,
    LENGTHS_FILE,
    META,
    ROWS_FILE,
    TOKENS_FILE,
    Progress,
    ShardMaker,
    file_sizes,
    token_dtype,
)
from axonlaunch.data.sources import SourceFile
from axonlaunch.system.cache import cache_folder

_FORMAT = 2
"""Of what is in a shard; another one is never read, for its name has this in it."""
_OPEN_SHARDS = 4096
"""Files that stay mapped: of 64 GB of text, or of 32 GB with masks."""


@dataclass(frozen=True)
class Shard:
    """The tokens of some files, or of a part of one.

    Attributes:
        folder: Where they are.
        files: Names of the files.
        progress: At the end.
        dtype: Of a token.
        masks: Whether some tokens don't count.
        made: When its folder was: a shard that is made again is mapped again.
    """

    folder: Path
    files: tuple[str, ...]
    progress: Progress
    dtype: str
    masks: bool
    made: int

    @property
    def num_documents(self) -> int:
        """How many there are."""
        return sum(self.progress.documents)

    def lengths(self) -> npt.NDArray[np.uint32]:
        """Read the tokens of each document, [documents]."""
        return np.fromfile(self.folder / LENGTHS_FILE, dtype=np.uint32)

    def tokens(self) -> npt.NDArray[Any]:
        """Return all tokens, memory-mapped."""
        return _map_file(str(self.folder / TOKENS_FILE), self.dtype, self.made)

    def counted_tokens(self) -> npt.NDArray[Any] | None:
        """Return for each token whether it counts; None: all do."""
        if not self.masks:
            return None
        return _map_file(str(self.folder / COUNTED_FILE), "uint8", self.made)

    def place(self, document: int) -> str:
        """Return the file and the row of a document."""
        ends = list(itertools.accumulate(self.progress.documents))
        file = next(index for index, end in enumerate(ends) if document < end)
        rows = np.fromfile(self.folder / ROWS_FILE, dtype=np.uint32, count=1, offset=4 * document)
        return f"{self.files[file]}, row {int(rows[0])}"


class Corpus:
    """The shards of files, in order; one that is not there yet is made when it is asked for.

    Where a shard begins is known when the one before it is complete.
    """

    def __init__(
        self,
        sources: Sequence[SourceFile],
        encoder: Encoder,
        *,
        folder: Path,
        skip_bad: bool,
        report: OnProgress,
    ) -> None:
        """Choose files; none is read.

        Args:
            sources: The files.
            encoder: Makes documents of their rows.
            folder: Where shards are kept.
            skip_bad: Whether rows that are none are left out.
            report: Is called now and then.
        """
        self._groups = [*_groups(sources)]
        self._sizes = [sum(source.size for source in group) for group in self._groups]
        self._encoder, self._folder, self._skip_bad = encoder, folder, skip_bad
        self._maker = ShardMaker(encoder, skip_bad=skip_bad)
        self._report = report
        self._shards: list[Shard] = []
        self._tokens = 0
        self._group, self._start = 0, Progress()
        """Where the next shard begins."""

    def __iter__(self) -> Iterator[Shard]:
        """Yield all shards.

        Raises:
            BadRowsError: A row is none.
            UnreadableFileError: A file can't be read to its end.
            OSError: The folder can't be written.
        """
        for number in itertools.count():
            if (shard := self.shard(number)) is None:
                return
            yield shard

    def shard(self, number: int) -> Shard | None:
        """Return a shard by its place, made now if it is not in the cache; None behind the last.

        Raises:
            BadRowsError: Rows of it can't be read, and the configuration does not skip those.
        """
        while len(self._shards) <= number and self._group < len(self._groups):
            shard = self._next()
            if shard.progress.bad and not self._skip_bad:
                raise shard_maker.BadRowsError(shard.progress)
            self._shards.append(shard)
            self._tokens += shard.progress.tokens
            if shard.progress.is_last:
                self._group, self._start = self._group + 1, Progress()
            else:
                self._start = Progress.behind(shard.progress)
        return self._shards[number] if number < len(self._shards) else None

    def _next(self) -> Shard:
        """Return the shard that begins where the last one ends."""
        files, start = self._groups[self._group], self._start
        named = [[file.name, file.size, file.stamp] for file in files]
        begins = [start.file, start.row, start.offset, shard_maker.SHARD_SIZE]
        text = json.dumps([_FORMAT, self._encoder.fingerprint, named, begins])
        complete = self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        while (shard := self._open_shard(complete)) is None:
            partial = complete.with_name(f"{complete.name}.partial")
            waits = Tokenising(files[start.file].name, 0.0, waits=True)
            with writer_lock(partial, waits=functools.partial(self._report, waits)) as is_current:
                if not is_current or complete.exists():
                    continue  # another process has completed it
                self._maker.make(partial, files, start, self._report_in_all)
                partial.rename(complete)
        return shard

    def _report_in_all(self, state: Tokenising) -> None:
        """Report how far a group is, as how far all files are."""
        before, size = sum(self._sizes[: self._group]), self._sizes[self._group]
        fraction = (before + state.fraction * size) / max(1, sum(self._sizes))
        self._report(replace(state, fraction=fraction, tokens=self._tokens + state.tokens))

    def _open_shard(self, folder: Path) -> Shard | None:
        """Return a complete shard; None where it is not there, or was corrupt and is gone."""
        if not folder.is_dir():
            return None
        dtype, masks = token_dtype(self._encoder), self._encoder.masks
        try:
            progress = Progress.read(folder / META)
            sizes = file_sizes(progress, self._encoder)
            is_whole = all((folder / name).stat().st_size == sizes[name] for name in sizes)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            is_whole = False
        if not is_whole:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        names = tuple(source.name for source in self._groups[self._group])
        return Shard(folder, names, progress, dtype, masks, folder.stat().st_ctime_ns)


def folder_of(cache_dir: str | None) -> Path:
    """Return the folder that tokens are kept in; None: one of the user's cache."""
    return cache_folder() / "tokens" if cache_dir is None else Path(cache_dir).expanduser()


def _groups(sources: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, ...]]:
    """Yield the files that share shards, in order: as many folders as files would be too many."""
    group: list[SourceFile] = []
    size = 0
    for source in sources:
        if group and size + source.size > shard_maker.SHARD_SIZE:
            yield tuple(group)
            group, size = [], 0
        group.append(source)
        size += source.size
    if group:
        yield tuple(group)


@contextmanager
def writer_lock(partial: Path, *, waits: Callable[[], None]) -> Iterator[bool]:
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


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _map_file(file: str, dtype: str, made: int) -> npt.NDArray[Any]:
    del made  # of a shard in whose place another one may be by now
    if not os.stat(file).st_size:  # noqa: PTH116 - and nothing can be mapped of nothing
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
