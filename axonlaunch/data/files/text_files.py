"""Checks whether a file is text to train on unchanged, and suggests what to do if not.

The name decides if its suffix identifies the content; otherwise the first bytes do. Nothing is
converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from axonlaunch.config.problems.errors import ConfigIssue

_RECORDS = (
    "holds records, whose markup would be learned with their text; write only the text to a .txt "
    "file"
)
_COMPRESSED = "is compressed, which is not text; decompress it, as in"
_TOKENS = "token numbers are read by data=tokens data.path=FILE"
_REFUSED_NAMES = {
    **dict.fromkeys((".jsonl", ".ndjson"), f"{_RECORDS}, as in jq -r .text FILE > FILE.txt"),
    **dict.fromkeys((".json", ".csv", ".tsv"), _RECORDS),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".avro"), _RECORDS),
    ".gz": f"{_COMPRESSED} gunzip -k FILE",
    ".bz2": f"{_COMPRESSED} bunzip2 -k FILE",
    ".xz": f"{_COMPRESSED} unxz -k FILE",
    ".zst": f"{_COMPRESSED} unzstd FILE",
    ".zip": f"{_COMPRESSED} unzip FILE",
    **dict.fromkeys((".bin", ".npy", ".npz"), f"is not text; {_TOKENS}"),
}
"""Suffixes of files that are not plain text, with the reason and what to do.

Markdown, HTML and source code are not included: such a file is one document, and the markup is part
of the author's text. In CSV and JSON, the markup was added to store the text. To train on it
anyway, users can name a copy .txt.
"""
CHECKED_BYTES = 2**20
"""Number of bytes at the beginning of a file that are checked, because corpora are large."""
_STRAY = 0.01
"""Fraction of bytes that may be invalid UTF-8, because stray ones do no harm. French in Latin-1
has 3%.
"""
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Characters by which Python's ``surrogateescape`` replaces bytes that are not UTF-8."""


def refused_name(path: Path) -> str | None:
    """Return why a file with this name is not text; None if only its content can tell."""
    return _REFUSED_NAMES.get(path.suffix.lower())


def refused_content(content: bytes) -> str | None:
    """Return why a file's content is not text; None if it is text."""
    first = content[:CHECKED_BYTES]
    if b"\0" in first:
        return f"is not text, it has NUL bytes; {_TOKENS}; UTF-16 needs iconv -f UTF-16 -t UTF-8"
    invalid = len(_NOT_UTF8.findall(first.decode(errors="surrogateescape")))
    if invalid > _STRAY * len(first):
        return (
            f"is not text in UTF-8, more than {_STRAY:.0%} of its bytes can't be decoded; convert "
            "it, as in iconv -f LATIN1 -t UTF-8"
        )
    return None


def text_file_issues(
    refused: Iterable[tuple[Path, str]], *, patterns: list[str]
) -> list[ConfigIssue]:
    """Return a problem for each reason; it names the first file and counts the others.

    Args:
        refused: Files, with the reason why they are not text.
        patterns: The value of ``data.files``.
    """
    files: dict[str, list[Path]] = {}
    for path, reason in refused:
        files.setdefault(reason, []).append(path)
    issues = []
    for reason, (path, *others) in files.items():
        which = f"{path} (and {len(others)} more)" if others else str(path)
        issues.append(ConfigIssue("data.files", f"{which} {reason}", patterns))
    return issues
