"""Whether a file is text that a model is to learn as it stands, and what to do where it is not.

It goes by the name where that says what is inside, else by the first bytes; it converts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from axonlaunch.config.errors import ConfigIssue

_RECORDS = (
    "holds records, whose markup would be learned with their text; write the text alone to a .txt "
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
"""Endings that say what is inside, to what is wrong with it and what to do.

Markdown, HTML and sources are not among them: such a file is one document, and its markup is part
of what somebody wrote. In CSV and JSON the markup was added by whoever stored the text. Who wants a
model to learn that too can name a copy .txt.
"""
LOOKED_AT = 2**20
"""Bytes of a file's beginning, by which its content is judged: corpora are large."""
_STRAY = 0.01
"""Share of bytes that may not be UTF-8: a stray one does no harm. French in Latin-1 has 3%."""
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""What Python's ``surrogateescape`` makes of a byte that is not part of UTF-8."""


def refused_name(path: Path) -> str | None:
    """Return why a file of this name is not text; None where only its content can say."""
    return _REFUSED_NAMES.get(path.suffix.lower())


def refused_content(content: bytes) -> str | None:
    """Return why a file's content is not text; None where it is."""
    first = content[:LOOKED_AT]
    if b"\0" in first:
        return f"is not text, it has NUL bytes; {_TOKENS}; UTF-16 needs iconv -f UTF-16 -t UTF-8"
    wrong = len(_NOT_UTF8.findall(first.decode(errors="surrogateescape")))
    if wrong > _STRAY * len(first):
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
        refused: Files, and why they are not text.
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
