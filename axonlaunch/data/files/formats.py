"""Formats and compressions of files with rows, by the suffixes of their names."""

from __future__ import annotations

from pathlib import PurePosixPath

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_OF_PYARROW = (".parquet", ".arrow", ".zst")


def suffixes(name: str) -> tuple[str, str]:
    """Return a file's format and compression, from its name."""
    path = PurePosixPath(name.lower())
    if path.suffix in COMPRESSIONS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def needs_pyarrow(name: str) -> bool:
    """Return whether pyarrow reads a file."""
    return any(suffix in _OF_PYARROW for suffix in suffixes(name))
