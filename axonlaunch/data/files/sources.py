"""Finds the files with the rows of a dataset, locally or in storage that fsspec supports.

No file is opened here; ``rows`` reads them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, cast

from axonlaunch.config.values.url import is_url
from axonlaunch.data.files.formats import FORMATS, suffixes
from axonlaunch.system.storage.home import expand_home
from axonlaunch.system.storage.refusals import is_refusal

_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` of datasets writes: for one dataset, and for several splits."""


class UnreachableStorageError(OSError):
    """Remote storage does not answer; a later request may succeed."""


@dataclass(frozen=True)
class SourceFile:
    """A file of rows.

    Attributes:
        name: Path or URL, as shown to users.
        format: One of ``FORMATS``.
        compression: One of ``COMPRESSIONS``, or empty.
        size: Size in bytes.
        stamp: A value that changes with the file: modification time, or version in remote storage.
            Files of the Hub have none, because their names contain the commit.
        path: Path to open if it is not the name, as for files in the Hub's cache; else empty.
        after: Number of the row before the first one that is read, as ``RowReader`` counts.
        last: Number of the last row that is read; None: all.
    """

    name: str
    format: str
    compression: str
    size: int
    stamp: str
    path: str = ""
    after: int = 0
    last: int | None = None

    @property
    def identity(self) -> list[str | int]:
        """Values that identify the rows: two files with equal values have the same rows."""
        rows = [] if self.last is None else [self.after, self.last]
        return [self.name, self.size, self.stamp, *rows]

    def overlaps(self, other: SourceFile) -> bool:
        """Return whether both read at least one common row."""
        ends = [each.last if each.last is not None else sys.maxsize for each in (self, other)]
        return self.name == other.name and max(self.after, other.after) < min(ends)

    def open(self) -> BinaryIO:
        """Open the file for reading, without decompression.

        Raises:
            OSError: The file can't be opened.
        """
        if not self.path and is_url(self.name):
            return cast("BinaryIO", _filesystem(self.name).open(self.name, "rb"))
        return Path(self.path or self.name).open("rb")


def match_files(pattern: str) -> list[SourceFile]:
    """Return the files of a path, a glob or a URL, by name.

    Raises:
        ValueError: No file matches, or one has an unknown format.
        OSError: The storage can't be reached.
        ImportError: The package for this storage is not installed.
    """
    names = [*(_remote(pattern) if is_url(pattern) else _local(pattern))]
    if unknown := [why for name in names if (why := unknown_format(name)) is not None]:
        raise ValueError(unknown[0])
    return [_source(name) for name in names]


def _local(pattern: str) -> Iterator[str]:
    """Yield the files of a path or a glob.

    Raises:
        ValueError: No file matches.
    """
    path = expand_home(pattern)
    # An existing path is used literally, even with a bracket in its name.
    names = [str(path)] if path.exists() else sorted(glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = [file for name in map(Path, names) for file in _files_of(name)]
    if not files and path.is_dir():
        raise ValueError(_no_files(path, pattern))
    if not files:
        raise ValueError(f"no file matches, seen from {Path.cwd()}")
    yield from (str(file.absolute()) for file in files)


def _files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a dataset folder; empty for other folders."""
    if path.is_file():
        return [path]
    try:
        state = json.loads((path / _STATE).read_text())
        return [path / str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _no_files(path: Path, pattern: str) -> str:
    if (path / _SPLITS).is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        return f"it has several splits; write {pattern.rstrip('/')}/{splits[0]}"
    return f"it is a folder; write {pattern.rstrip('/')}/**/*.jsonl for the files in it"


def _remote(pattern: str) -> list[str]:
    """Return the URLs of the files that a URL or a glob matches.

    Raises:
        ValueError: No file matches.
        OSError: The storage can't be reached.
        ImportError: The package for this storage is not installed.
    """
    filesystem = _filesystem(pattern)
    try:
        names = sorted(filesystem.glob(pattern)) if "*" in pattern else [pattern]
        names = [name for name in names if filesystem.isfile(name)]
    except Exception as error:  # storage backends raise various errors
        message = f"can't be reached: {type(error).__name__}: {error}"
        if is_refusal(error):
            raise OSError(message) from error
        raise UnreachableStorageError(message) from error
    if not names:
        raise ValueError("no file matches")
    return [name if is_url(name) else filesystem.unstrip_protocol(name) for name in names]


def _filesystem(url: str) -> Any:
    from fsspec.core import url_to_fs

    return url_to_fs(url)[0]


def unknown_format(name: str) -> str | None:
    """Return why the format of a file is unknown; None if it is known."""
    if suffixes(name)[0] in FORMATS:
        return None
    formats = ", ".join(FORMATS)
    return f"{name} has an unknown format; known: {formats}, also compressed"


def _source(name: str) -> SourceFile:
    if is_url(name):
        about = _filesystem(name).info(name)
        versions = (about.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "updated"))
        size, stamp = int(about["size"]), str(next(filter(None, versions), ""))
    else:
        stat = Path(name).stat()
        size, stamp = stat.st_size, str(stat.st_mtime_ns)
    return SourceFile(name, *suffixes(name), size, stamp)
