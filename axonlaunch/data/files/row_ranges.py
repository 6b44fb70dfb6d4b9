"""Selects consecutive rows of files, and counts rows.

Parquet files are counted by their metadata. Other files are read up to the last selected row, or
to their end if a percentage or the number of rows from the end is asked for. What was found in a
large file is kept in the user's cache, so that each rank need not read the file again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from axonlaunch.data.files.rows import RowReader
from axonlaunch.data.files.sources import SourceFile
from axonlaunch.system.storage.cache import cache_folder, keep
from axonlaunch.system.storage.files import read_text

_LARGE = 16 << 20
"""Minimum size of a file, in bytes, for which the cache stores a note."""
_LARGEST_NOTE = 1 << 16
_OF_HUB = "hf://"
"""Start of names that contain a commit, so that the file needs no stamp."""


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
    if (count := reader.num_rows()) is not None:
        return count if at_most is None else min(count, at_most)

    def count_by_reading() -> list[int]:
        count = 0
        for count, _ in enumerate(reader, start=1):
            if count == at_most:
                break
        return [count]

    return _keep_numbers([*source.identity, "count", at_most or 0], count_by_reading)[0]


def _with_rows(source: SourceFile, begin: int, end: int, *, of: int) -> SourceFile:
    """Return a file with the rows from ``begin`` to before ``end``; ``of`` is their number."""
    if begin == 0 and end == of:
        # The number of the last row is only needed if the file may have more rows.
        is_all = count_rows(source, at_most=of + 1) == of
        if is_all:
            return source
    reader = RowReader(source, counts_only=True)
    if reader.num_rows() is not None:
        return replace(source, after=source.after + begin, last=source.after + end)

    def find_by_reading() -> list[int]:
        previous, last = source.after, source.after
        for index, (last, _) in enumerate(reader, start=1):
            previous = last if index == begin else previous
            if index == end:
                break
        return [previous, last]

    after, last = _keep_numbers([*source.identity, "rows", begin, end], find_by_reading)
    return replace(source, after=after, last=last)


def _keep_numbers(key: list[str | int], find: Callable[[], list[int]]) -> list[int]:
    """Return numbers found in a file, from the user's cache if the file is large and unchanged."""
    _, size, stamp, *_ = key
    if int(size) < _LARGE or (not stamp and not str(key[0]).startswith(_OF_HUB)):
        return find()
    text = json.dumps(key)
    file = cache_folder() / "rows" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        content = json.loads(read_text(file, at_most=_LARGEST_NOTE))
        if content["of"] == key:
            return [int(number) for number in content["numbers"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    numbers = find()
    keep(file, json.dumps({"of": key, "numbers": numbers}))
    return numbers
