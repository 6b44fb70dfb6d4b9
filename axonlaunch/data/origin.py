"""Describes what a run's training rows are made of: files, tokenizer, chat template and options.

A checkpoint holds this description, because its position counts rows. A file is described by a
checksum of the tokens, or bytes, that are trained on; its path and times may change.
``describe_rows`` makes the description.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.config.errors import ConfigIssue

_SHOWN = 60


@dataclass(frozen=True)
class Origin:
    """What rows are made of.

    Attributes:
        files: (name, checksum) of the training files, in order.
        options: Options of data that decide which rows there are.
        tokenizer: Fingerprint of the tokenizer; empty for data that is not tokenised.
        template: Fingerprint of the chat template; empty for data that has none.
        shards: Number of shards that ``files`` covers, where the others are not yet tokenised;
            None: all.
    """

    files: tuple[tuple[str, str], ...]
    options: Mapping[str, Any]
    tokenizer: str = ""
    template: str = ""
    shards: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the form in which a manifest holds it."""
        return {**dataclasses.asdict(self), "files": [list(entry) for entry in self.files]}

    @classmethod
    def from_dict(cls, content: Any) -> Origin:
        """Read what ``to_dict`` returned.

        Raises:
            TypeError: It has another form.
            KeyError: Part of it is missing.
        """
        files = tuple((name, digest) for name, digest in content["files"])
        texts = [content["tokenizer"], content["template"], *(t for entry in files for t in entry)]
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise TypeError("files")
        shards = content["shards"]
        if not isinstance(content["options"], dict) or not isinstance(shards, int | None):
            raise TypeError("options")
        return cls(files, content["options"], content["tokenizer"], content["template"], shards)


def find_differences(saved: Origin, now: Origin | None) -> Iterator[tuple[str, str]]:
    """Yield ``(key, message)`` for what differs from the description in a checkpoint.

    Args:
        saved: The description in the checkpoint.
        now: That of the data; None: it is a dataset of the user's own.
    """
    if now is None:
        yield "data.name", f"was {_short(saved.options.get('name'))}"
        return
    for name in sorted({*saved.options, *now.options}):
        before, after = saved.options.get(name), now.options.get(name)
        if before != after:
            yield f"data.{name}", f"was {_short(before)}"
    if saved.tokenizer != now.tokenizer:
        yield "tokenizer.path", "is not the tokenizer that its rows were made with"
    if saved.template != now.template:
        yield "tokenizer.path", "has another chat template than its rows were written with"
    has_same_text = saved.tokenizer == now.tokenizer and saved.template == now.template
    if has_same_text and _digests(saved) != _digests(now):
        yield "data.files", _changed_files(saved.files, now.files)


def _digests(origin: Origin) -> list[str]:
    return [digest for _, digest in origin.files]


def _changed_files(saved: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> str:
    """Name the files that differ: those that changed, are missing or are new, or else the order."""
    before, after = dict(saved), dict(now)
    parts = [
        _name_first([n for n in after if n in before and after[n] != before[n]], "changed"),
        _name_first([name for name in before if name not in after], "missing"),
        _name_first([name for name in after if name not in before], "new"),
    ]
    if said := "; ".join(part for part in parts if part):
        return said
    return "the same files in another order"


def _name_first(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}"


def _short(value: Any) -> str:
    text = printable(json.dumps(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def printable(text: str) -> str:
    """Return a text without what would move a terminal's cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]


def changed_data_issues(
    saved: Origin, now: Origin | None, *, where: Path, data: Any
) -> list[ConfigIssue]:
    """Return the differences from a checkpoint's rows as problems of a configuration.

    Args:
        saved: The description in the checkpoint.
        now: That of the data.
        where: The checkpoint.
        data: The configuration of the data.
    """
    issues = []
    for key, message in find_differences(saved, now):
        value = getattr(data, key.removeprefix("data."), ...) if key.startswith("data.") else ...
        text = (
            f"{message} (in {where}, whose position counts other rows); use the same, or "
            "checkpoint.changed_data=restart to go on from the first row of this data"
        )
        issues.append(ConfigIssue(key, text, value))
    return issues
