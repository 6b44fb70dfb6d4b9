"""Checks the names of runs and of their folders.

Refuses characters that control a terminal, and bytes that are not text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path

from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.config.schema import RunConfig

_LONGEST_NAME, _LONGEST_PATH = 240, 2048
"""Bytes of a folder's name and of a path, with room for the files of a run below it."""
_UNREADABLE = {
    "Cc": "a control character",
    "Cs": "a byte that is not UTF-8",
    "Zl": "a line break",
    "Zp": "a line break",
}
"""Categories of Unicode that no name may contain, in words."""
_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def run_name_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield the problems of a run's name and of the folders that it writes."""
    folders = Path(config.name).parts
    if not folders or Path(config.name).is_absolute() or ".." in folders:
        message = "must be a folder's name below runs/; use run_dir for a path"
        yield ConfigIssue("name", message, config.name)
    if not config.run_dir:
        yield ConfigIssue("run_dir", "is empty; write a path, or auto", config.run_dir)
    paths = {"name": config.name, "run_dir": config.run_dir}
    paths["checkpoint.path"] = config.checkpoint.path or ""
    for key, path in paths.items():
        if problem := _unreadable_part(path):
            yield ConfigIssue(key, problem, ascii(path))
            continue
        sizes = [len(part.encode()) for part in Path(path).parts]
        if max(sizes, default=0) > _LONGEST_NAME or sum(sizes) > _LONGEST_PATH:
            message = f"is longer than a path may be; use {_LONGEST_NAME} bytes a folder at most"
            yield ConfigIssue(key, message, path)


def _unreadable_part(path: str) -> str | None:
    """Return the problem of a path with unreadable characters; None for a valid path."""
    for character in path:
        kind = _UNREADABLE.get(unicodedata.category(character))
        if character in "\n\r":
            kind = "a line break"
        elif character in _DIRECTION_MARKS:
            kind = "a mark that changes the direction of text"
        if kind is not None:
            return f"contains {kind} ({ascii(character)[1:-1]}); use letters, digits, - and _"
    if any(not part.strip() for part in Path(path).parts):
        return "has a name of blanks only; use letters, digits, - and _"
    return None
