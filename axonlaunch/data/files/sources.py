"""Finds the files with the rows of a dataset, locally or in storage that fsspec supports.

No file is opened here; ``rows`` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, cast

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.config.values.url import is_url

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` of datasets writes: for one dataset, and for several splits."""


@dataclass(frozen=True)
class SourceFile:
    """A file of rows.

    Attributes:
        name: Path or URL, as shown to users.
        format: One of ``FORMATS``.
        compression: One of ``COMPRESSIONS``, or empty.
        size: Size in bytes.
        stamp: A value that changes with the file: modification time, or version in remote storage.
    """

    name: str
    format: str
    compression: str
    size: int
    stamp: str

    def open(self) -> BinaryIO:
        """Open the file for reading, without decompression.

        Raises:
            OSError: It can't be opened.
        """
        if is_url(self.name):
            return cast("BinaryIO", _filesystem(self.name).open(self.name, "rb"))
        return Path(self.name).open("rb")


def find_sources(patterns: Sequence[str], *, key: str = "data.files") -> list[SourceFile]:
    """Expand paths, globs and URLs; each file once, ordered by pattern, then by name.

    Args:
        patterns: Patterns as written by the user.
        key: Configuration key of the patterns.

    Raises:
        ConfigError: A pattern matches nothing, or a file has an unknown format; lists all problems.
    """
    problems: list[ConfigIssue] = []
    sources: dict[str, SourceFile] = {}
    for pattern in patterns:
        try:
            names = [*(_remote(pattern) if is_url(pattern) else _local(pattern))]
        except (ValueError, OSError, ImportError) as reason:
            problems.append(ConfigIssue(key, str(reason), pattern))
            continue
        for name in names:
            if (why := _unknown_format(name)) is not None:
                problems.append(ConfigIssue(key, why, pattern))
            elif name not in sources:
                sources[name] = _source(name)
    if problems:
        raise ConfigError(problems)
    return [*sources.values()]


def _local(pattern: str) -> Iterator[str]:
    """Yield the files of a path or a glob.

    Raises:
        ValueError: No file matches.
    """
    path = Path(pattern).expanduser()
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
        raise OSError(f"can't be reached: {type(error).__name__}: {error}") from error
    if not names:
        raise ValueError("no file matches")
    return [name if is_url(name) else filesystem.unstrip_protocol(name) for name in names]


def _filesystem(url: str) -> Any:
    from fsspec.core import url_to_fs

    return url_to_fs(url)[0]


def _unknown_format(name: str) -> str | None:
    if _suffixes(name)[0] in FORMATS:
        return None
    formats = ", ".join(FORMATS)
    return f"{name} has an unknown format; known: {formats}, also compressed"


def _suffixes(name: str) -> tuple[str, str]:
    """Return a file's format and compression, from its name."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        return Path(path.stem).suffix, path.suffix
    return path.suffix, ""


def _source(name: str) -> SourceFile:
    if is_url(name):
        about = _filesystem(name).info(name)
        versions = (about.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "updated"))
        size, stamp = int(about["size"]), str(next(filter(None, versions), ""))
    else:
        stat = Path(name).stat()
        size, stamp = stat.st_size, str(stat.st_mtime_ns)
    return SourceFile(name, *_suffixes(name), size, stamp)
