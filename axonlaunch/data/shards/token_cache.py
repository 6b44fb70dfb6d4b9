"""Cache of tokenized files, memory-mapped.

A corpus is a sequence of shards of about 16 MB of text. A large file has several shards, small
files share one. The name of a shard is a hash of the files, its start position, the tokenizer and
the options. An unfinished shard is a folder ``NAME.partial``, locked by the process that writes it;
the next process continues it. A shard that changed after it was written is built again.
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

from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.shards import cached_folder, shard_maker
from axonlaunch.data.shards.cached_folder import writer_lock
from axonlaunch.data.shards.encoding import Encoder, OnProgress, Tokenizing
from axonlaunch.data.shards.shard_maker import (
    COUNTED_FILE,
    LENGTHS_FILE,
    META,
    ROWS_FILE,
    TOKENS_FILE,
    Progress,
    ShardMaker,
    token_dtype,
)
from axonlaunch.system.storage.cache import cache_folder
from axonlaunch.system.storage.files import open_regular
from axonlaunch.system.storage.home import expand_home

_FORMAT = 4
"""Version of the content of shards; part of their names, so other versions are never read."""
_VERIFIED_WHEN_OPENED = (META, LENGTHS_FILE, ROWS_FILE)
"""Files verified when a shard is opened. Tokens, which are large, are verified when they are
mapped, and before a run starts.
"""
_OPEN_SHARDS = 4096
"""Number of files that stay mapped: 64 GB of text, or 32 GB with masks."""


@dataclass(frozen=True)
class Shard:
    """Tokens of some files, or of a part of one.

    Attributes:
        folder: Folder of the shard.
        files: Names of the files.
        progress: Progress at the end.
        dtype: Data type of tokens.
        masks: Whether some tokens do not count as targets.
        created: Creation time of the folder; a shard that was built again is mapped again.
    """

    folder: Path
    files: tuple[str, ...]
    progress: Progress
    dtype: str
    masks: bool
    created: int

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(self.progress.documents)

    def lengths(self) -> npt.NDArray[np.uint32]:
        """Read the number of tokens of each document, [documents]."""
        return np.fromfile(self.folder / LENGTHS_FILE, dtype=np.uint32)

    def tokens(self) -> npt.NDArray[Any]:
        """Return all tokens, memory-mapped."""
        return _map_file(self.folder / TOKENS_FILE, self.dtype, self.created)

    def counted_tokens(self) -> npt.NDArray[Any] | None:
        """Return whether each token counts as a target; None: all do."""
        if not self.masks:
            return None
        return _map_file(self.folder / COUNTED_FILE, "uint8", self.created)

    def source_sums(self) -> list[tuple[str, str]]:
        """Return (name, checksum of tokens) of each file with documents in this shard."""
        parts = zip(self.progress.documents, self.progress.source_sums, strict=True)
        of_files = enumerate(parts)
        return [(self.files[n], f"{count}-{crc32:08x}") for n, (count, crc32) in of_files if count]

    def location(self, document: int) -> str:
        """Return the file and the row of a document."""
        ends = list(itertools.accumulate(self.progress.documents))
        file = next(index for index, end in enumerate(ends) if document < end)
        rows = np.fromfile(self.folder / ROWS_FILE, dtype=np.uint32, count=1, offset=4 * document)
        return f"{self.files[file]}, row {int(rows[0])}"


class Corpus:
    """Shards of files, in order, built when they are requested and not yet cached.

    The start of a shard is known once the previous shard is complete.
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
        """Store the files, without reading them.

        Args:
            encoder: Encodes their rows as documents.
            folder: Folder of the shards.
            skip_bad: Whether invalid rows are left out.
            report: Called from time to time.
        """
        self._groups = [*_groups(sources)]
        self._sizes = [sum(source.size for source in group) for group in self._groups]
        self._encoder, self._folder, self._skip_bad = encoder, folder, skip_bad
        self._maker = ShardMaker(encoder, skip_bad=skip_bad)
        self._report = report
        self._shards: list[Shard] = []
        self._begins: list[tuple[int, Progress]] = []
        """Group of each shard, and the start of the shard in it."""
        self._tokens = 0
        self._group, self._start = 0, Progress()
        """Start of the next shard."""

    def __iter__(self) -> Iterator[Shard]:
        """Yield all shards.

        Raises:
            BadRowsError: A row is invalid.
            UnreadableFileError: A file can't be read to its end.
            OSError: The folder can't be written.
        """
        for number in itertools.count():
            if (shard := self.shard(number)) is None:
                return
            yield shard

    def shard(self, number: int) -> Shard | None:
        """Return a shard by its index, built now if it is not cached; None after the last one.

        Raises:
            BadRowsError: The shard has invalid rows, and the configuration does not skip them.
        """
        while len(self._shards) <= number and self._group < len(self._groups):
            begins = self._group, self._start
            shard = self._find_or_build(*begins)
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
        """Number of shards, from the first one on, that are known to be tokenized."""
        return len(self._shards)

    @property
    def is_known(self) -> bool:
        """Whether all shards are tokenized."""
        return self._group == len(self._groups)

    def verify(self, numbers: Sequence[int]) -> None:
        """Compare all files of shards with their checksums; build changed shards again.

        Args:
            numbers: Indices of shards that ``shard`` has returned.

        Raises:
            OSError: A file is a link or can't be read, or the folder can't be written.
        """
        files = [self._groups[group][0].name for group, _ in self._begins]
        with ThreadPoolExecutor(thread_name_prefix="verifying") as pool:
            folders = [self._shards[number].folder for number in numbers]
            for index, change in enumerate(pool.map(cached_folder.find_change, folders)):
                number = numbers[index]
                fraction = index / len(folders)
                self._report(Tokenizing(files[number], fraction, verifies=True))
                if change is not None:
                    cached_folder.discard(folders[index])
                    _say_changed(folders[index], change)
                    self._shards[number] = self._find_or_build(*self._begins[number])

    def _find_or_build(self, group: int, start: Progress) -> Shard:
        """Return the shard of a group of files that starts at a progress."""
        files = self._groups[group]
        named = [file.identity for file in files]
        begins = [start.file, start.row, start.offset, shard_maker.SHARD_SIZE]
        text = json.dumps([_FORMAT, self._encoder.fingerprint, named, begins])
        complete = self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        partial = complete.with_name(f"{complete.name}.partial")
        while True:
            shard, change = self._open_shard(complete, files)
            if shard is not None:
                return shard
            waits = Tokenizing(files[start.file].name, 0.0, waits=True)
            with writer_lock(partial, waits=functools.partial(self._report, waits)) as is_current:
                if not is_current:
                    continue  # another process has completed it
                if complete.exists():
                    if self._open_shard(complete, files)[0] is not None:
                        continue
                    if change is not None and (complete / cached_folder.SUMS).exists():
                        _say_changed(complete, change)
                    cached_folder.remove(complete)
                self._maker.make(partial, files, start, self._report_total)
                sums = shard_maker.written_sums(partial)
                cached_folder.publish(partial, complete, sums=sums)

    def _report_total(self, state: Tokenizing) -> None:
        """Report the progress in a group as the progress in all files."""
        group = min(self._group, len(self._groups) - 1)
        previous, size = sum(self._sizes[:group]), self._sizes[group]
        fraction = (previous + state.fraction * size) / max(1, sum(self._sizes))
        self._report(replace(state, fraction=fraction, tokens=self._tokens + state.tokens))

    def _open_shard(
        self, folder: Path, files: tuple[SourceFile, ...]
    ) -> tuple[Shard | None, str | None]:
        """Return (shard, None) or (None, description of a change); (None, None) if it is missing.

        Raises:
            OSError: The folder, or a file in it, is a link.
        """
        cached_folder.refuse_link(folder)
        if not folder.is_dir():
            return None, None
        if (change := cached_folder.find_change(folder, names=_VERIFIED_WHEN_OPENED)) is not None:
            return None, change
        try:
            progress = Progress.read(folder / META)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None, f"{META} is invalid"
        names = tuple(source.name for source in files)
        created = folder.stat().st_ctime_ns
        dtype, masks = token_dtype(self._encoder), self._encoder.masks
        return Shard(folder, names, progress, dtype, masks, created), None


def sums_by_file(shards: Iterable[Shard]) -> list[tuple[str, str]]:
    """Return (name, checksum of tokens) of the files of shards, in order."""
    parts = [entry for shard in shards for entry in shard.source_sums()]
    grouped = itertools.groupby(parts, lambda entry: entry[0])
    return [(name, _sum_of_parts([digest for _, digest in group])) for name, group in grouped]


def _sum_of_parts(sums: Sequence[str]) -> str:
    """Return one checksum for the parts of a file in several shards."""
    return sums[0] if len(sums) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16]


def _say_changed(folder: Path, change: str) -> None:
    """Report a change to the user, from a rank, a check of a configuration, or a command."""
    sys.stderr.write(f"data: {folder}: {change}; its tokens are built again\n")


def folder_of(cache_dir: str | None) -> Path:
    """Return the folder of the token cache; for None a folder in the user's cache."""
    return cache_folder() / "tokens" if cache_dir is None else expand_home(cache_dir)


def _groups(sources: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, ...]]:
    """Yield groups of files that share shards, in order, to avoid one folder per file."""
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
def _map_file(file: Path, dtype: str, created: int) -> npt.NDArray[Any]:
    """Map a file of a shard, after comparing its checksum when it is mapped first.

    Raises:
        OSError: The file has changed.
    """
    del created  # distinguishes successive shards with this path
    if not cached_folder.has_sum(file):
        cached_folder.discard(file.parent)
        message = "has changed since it was written; start the run again to rebuild its tokens"
        raise OSError(errno.EIO, message, str(file))
    with open_regular(file) as stream:
        if not os.fstat(stream.fileno()).st_size:  # an empty file can't be mapped
            return np.empty(0, dtype=dtype)
        return np.memmap(stream, dtype=dtype, mode="r")
