"""Selects consecutive rows of files, and counts rows.

Parquet files are counted by their metadata. Other files are read up to the last selected row, or
to their end if a percentage or the number of rows from the end is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from axonlaunch.data.files.rows import RowReader
from axonlaunch.data.files.sources import SourceFile


def take_rows(sources: Sequence[SourceFile], start: int, stop: int) -> list[SourceFile]:
    """Return the files with rows from ``start`` to before ``stop``, counted over all files.

    Raises:
        UnreadableFileError: A file can't be read as far as needed.
    """
    taken, first = [], 0
    for source in sources:
        if first >= stop:
            break
        count = count_rows(source, at_most=stop - first)
        begin, end = max(start - first, 0), min(stop - first, count)
        if begin < end:
            taken.append(_with_rows(source, begin, end, of=count))
        first += count
    return taken


def count_all_rows(sources: Iterable[SourceFile]) -> int:
    """Return the number of rows of files, blank lines not counted.

    Raises:
        UnreadableFileError: A file can't be read to its end.
    """
    return sum(map(count_rows, sources))


@lru_cache(maxsize=4096)
def count_rows(source: SourceFile, *, at_most: int | None = None) -> int:
    """Return the number of rows of a file; reading ends at ``at_most`` rows.

    Raises:
        UnreadableFileError: The file can't be read as far as needed.
    """
    reader = RowReader(source, counts_only=True)
    if (count := reader.num_rows()) is None:
        count = 0
        for count, _ in enumerate(reader, start=1):
            if count == at_most:
                break
    return count if at_most is None else min(count, at_most)


def _with_rows(source: SourceFile, begin: int, end: int, *, of: int) -> SourceFile:
    """Return a file with the rows from ``begin`` to before ``end``; ``of`` is their number."""
    if begin == 0 and end == of:
        # The number of the last row is only needed if the file may have more rows.
        is_all = count_rows(source, at_most=of + 1) == of
        if is_all:
            return source
    wanted = {begin, end}  # the rows before the first, and the last one
    numbers = {0: source.after}
    reader = RowReader(source, counts_only=True)
    if reader.num_rows() is None:
        for index, (number, _) in enumerate(reader, start=1):
            if index in wanted:
                numbers[index] = number
            if index == end:
                break
    else:
        numbers |= {index: source.after + index for index in wanted}
    return replace(source, after=numbers[begin], last=numbers[end])
