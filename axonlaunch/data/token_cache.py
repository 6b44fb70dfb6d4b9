"""Tokens of files, made once and memory-mapped from then on.

A corpus is a sequence of shards of some 16 MB of text; a large file has several, small ones share
them. The name of a shard is a hash of the files, where it begins, the tokenizer and the options. It
is complete or not there: until then it is a folder ``NAME.partial``, which the next process
continues, and which is locked by the one that writes. A shard that is not what was written is made
again.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.data import cached_folder, shard_maker
from axonlaunch.data.cached_folder import writer_lock
from axonlaunch.data.encoding import Encoder, OnProgress, Tokenising
from axonlaunch.data.shard_maker import (
    COUNTED_FILE,
    LENGTHS_FILE,
    META,
    ROWS_FILE,
    TOKENS_FILE,
    Progress,
    ShardMaker,
    token_dtype,
)
from axonlaunch.data.sources import SourceFile
from axonlaunch.system.cache import cache_folder
from axonlaunch.system.files import open_regular

_FORMAT = 4
"""Of what is in a shard; another one is never read, for its name has this in it."""
_READ_AT_ONCE = (META, LENGTHS_FILE, ROWS_FILE)
"""Files of a shard whose checksums are verified when it is opened; those of tokens, which are
large, when they are mapped, and before a run starts."""
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
        return _map_file(self.folder / TOKENS_FILE, self.dtype, self.made)

    def counted_tokens(self) -> npt.NDArray[Any] | None:
        """Return for each token whether it counts; None: all do."""
        if not self.masks:
            return None
        return _map_file(self.folder / COUNTED_FILE, "uint8", self.made)

    def source_sums(self) -> list[tuple[str, str]]:
        """Return (name, checksum of tokens) of each file that has documents here."""
        parts = zip(self.progress.documents, self.progress.source_sums, strict=True)
        of_files = enumerate(parts)
        return [(self.files[n], f"{count}-{crc32:08x}") for n, (count, crc32) in of_files if count]

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
        self._begins: list[tuple[int, Progress]] = []
        """The group of each shard, and where the shard begins in it."""
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
            begins = self._group, self._start
            shard = self._find_or_make(*begins)
            if shard.progress.bad and not self._skip_bad:
                raise shard_maker.BadRowsError(shard.progress)
            self._shards.append(shard)
            self._begins.append(begins)
            self._tokens += shard.progress.tokens
            if shard.progress.is_last:
                self._group, self._start = self._group + 1, Progress()
            else:
                self._start = Progress.behind(shard.progress)
        return self._shards[number] if number < len(self._shards) else None

    @property
    def num_known(self) -> int:
        """Number of shards, from the first one on, that are tokenised as far as is known."""
        return len(self._shards)

    @property
    def is_known(self) -> bool:
        """Whether all shards are tokenised."""
        return self._group == len(self._groups)

    def verify(self, numbers: Sequence[int]) -> None:
        """Compare all files of shards with their checksums; make changed shards again.

        Args:
            numbers: Of shards that ``shard`` has returned.

        Raises:
            OSError: A file is a link or can't be read, or the folder can't be written.
        """
        files = [self._groups[group][0].name for group, _ in self._begins]
        with ThreadPoolExecutor(thread_name_prefix="verifying") as pool:
            folders = [self._shards[number].folder for number in numbers]
            for place, change in enumerate(pool.map(cached_folder.find_change, folders)):
                number = numbers[place]
                fraction = place / len(folders)
                self._report(Tokenising(files[number], fraction, verifies=True))
                if change is not None:
                    cached_folder.discard(folders[place])
                    _say_changed(folders[place], change)
                    self._shards[number] = self._find_or_make(*self._begins[number])

    def _find_or_make(self, group: int, start: Progress) -> Shard:
        """Return the shard of a group of files that begins behind a progress."""
        files = self._groups[group]
        named = [[file.name, file.size, file.stamp] for file in files]
        begins = [start.file, start.row, start.offset, shard_maker.SHARD_SIZE]
        text = json.dumps([_FORMAT, self._encoder.fingerprint, named, begins])
        complete = self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        partial = complete.with_name(f"{complete.name}.partial")
        while True:
            shard, change = self._open_shard(complete, files)
            if shard is not None:
                return shard
            waits = Tokenising(files[start.file].name, 0.0, waits=True)
            with writer_lock(partial, waits=functools.partial(self._report, waits)) as is_current:
                if not is_current:
                    continue  # another process has completed it
                if complete.exists():
                    if self._open_shard(complete, files)[0] is not None:
                        continue
                    if change is not None and (complete / cached_folder.SUMS).exists():
                        _say_changed(complete, change)
                    cached_folder.remove(complete)
                self._maker.make(partial, files, start, self._report_in_all)
                sums = shard_maker.written_sums(partial)
                cached_folder.publish(partial, complete, sums=sums)

    def _report_in_all(self, state: Tokenising) -> None:
        """Report how far a group is, as how far all files are."""
        group = min(self._group, len(self._groups) - 1)
        before, size = sum(self._sizes[:group]), self._sizes[group]
        fraction = (before + state.fraction * size) / max(1, sum(self._sizes))
        self._report(replace(state, fraction=fraction, tokens=self._tokens + state.tokens))

    def _open_shard(
        self, folder: Path, files: tuple[SourceFile, ...]
    ) -> tuple[Shard | None, str | None]:
        """Return a complete shard, or what has changed of it; (None, None) where it is missing.

        Raises:
            OSError: The folder, or a file in it, is a link.
        """
        cached_folder.refuse_link(folder)
        if not folder.is_dir():
            return None, None
        if (change := cached_folder.find_change(folder, names=_READ_AT_ONCE)) is not None:
            return None, change
        try:
            progress = Progress.read(folder / META)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None, f"{META} can't be understood"
        names = tuple(source.name for source in files)
        made = folder.stat().st_ctime_ns
        dtype, masks = token_dtype(self._encoder), self._encoder.masks
        return Shard(folder, names, progress, dtype, masks, made), None


def sums_by_file(shards: Iterable[Shard]) -> list[tuple[str, str]]:
    """Return (name, checksum of tokens) of the files of shards, in order."""
    parts = [entry for shard in shards for entry in shard.source_sums()]
    grouped = itertools.groupby(parts, lambda entry: entry[0])
    return [(name, _sum_of_parts([digest for _, digest in group])) for name, group in grouped]


def _sum_of_parts(sums: Sequence[str]) -> str:
    """Return one checksum for the parts of a file in several shards."""
    return sums[0] if len(sums) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16]


def _say_changed(folder: Path, change: str) -> None:
    """Tell the user; this may be a rank, a process that checks a configuration, or a command."""
    sys.stderr.write(f"data: {folder}: {change}; these tokens are made again\n")


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


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _map_file(file: Path, dtype: str, made: int) -> npt.NDArray[Any]:
    """Map a file of a shard, compared with its checksum when it is mapped first.

    Raises:
        OSError: It is not what was written.
    """
    del made  # distinguishes shards that had this path one after another
    if not cached_folder.has_sum(file):
        cached_folder.discard(file.parent)
        message = "is not what was written; start the run again, which makes these tokens again"
        raise OSError(errno.EIO, message, str(file))
    with open_regular(file) as stream:
        if not os.fstat(stream.fileno()).st_size:  # nothing can be mapped of an empty file
            return np.empty(0, dtype=dtype)
        return np.memmap(stream, dtype=dtype, mode="r")
