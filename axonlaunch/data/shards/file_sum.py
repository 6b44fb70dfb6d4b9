"""Checksums of data files, by which a resumed run detects changed files."""

from __future__ import annotations

import zlib
from pathlib import Path

_READ_WHOLE = 1 << 30
_SAMPLES, _SAMPLE_BYTES = 1024, 1 << 16


def sum_of_file(file: Path) -> str:
    """Return the size of a file and a CRC-32 of its content.

    Files above 1 GiB are sampled: 1,024 evenly spaced parts and the end, 64 MiB in total.
    """
    size = file.stat().st_size
    step = _SAMPLE_BYTES if size <= _READ_WHOLE else size // _SAMPLES
    total = 0
    with file.open("rb") as stream:
        for start in [*range(0, size, step), max(0, size - _SAMPLE_BYTES)]:
            stream.seek(start)
            total = zlib.crc32(stream.read(_SAMPLE_BYTES), total)
    return f"{size}-{total:08x}"
