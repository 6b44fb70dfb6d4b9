"""Describes the origin of a run's training rows: files, tokenizer, chat template and options.

A checkpoint includes this description, because its position counts rows. A file is described by a
checksum of its training tokens or bytes; its path and times may change. ``describe_rows`` creates
the description.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.config.problems.errors import ConfigIssue

_SHOWN = 60


@dataclass(frozen=True)
class Origin:
    """Origin of training rows.

    Attributes:
        files: (name, checksum) of the training files, in order.
        options: Options of the data that decide the rows.
        tokenizer: Fingerprint of the tokenizer; empty for data that is not tokenized.
        template: Fingerprint of the chat template; empty for data without one.
        shards: Number of shards that ``files`` covers if the others are not yet tokenized; None:
            all.
    """

    files: tuple[tuple[str, str], ...]
    options: Mapping[str, Any]
    tokenizer: str = ""
    template: str = ""
    shards: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the form that is stored in a manifest."""
        return {**dataclasses.asdict(self), "files": [list(entry) for entry in self.files]}

    @classmethod
    def from_dict(cls, content: Any) -> Origin:
        """Read the result of ``to_dict``.

        Raises:
            TypeError: A value has the wrong type.
            KeyError: A value is missing.
        """
        files = tuple((name, digest) for name, digest in content["files"])
        texts = [content["tokenizer"], content["template"], *(t for entry in files for t in entry)]
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise TypeError("files")
        shards = content["shards"]
        if not isinstance(content["options"], dict) or not isinstance(shards, int | None):
            raise TypeError("options")
        return cls(files, content["options"], content["tokenizer"], content["template"], shards)


def find_differences(saved: Origin, now: Origin) -> Iterator[tuple[str, str]]:
    """Yield ``(key, message)`` for each difference from the description in a checkpoint.

    If the kind of the data differs, nothing else is compared.
    """
    if saved.options.get("name") != now.options["name"]:
        yield "data.name", f"was {_short(saved.options.get('name'))}"
        return
    for name in sorted({*saved.options, *now.options}):
        old, new = saved.options.get(name), now.options.get(name)
        if old != new:
            yield f"data.{name}", f"was {_short(old)}"
    if saved.tokenizer != now.tokenizer:
        yield "tokenizer.path", "is not the tokenizer that its rows were made with"
    if saved.template != now.template:
        yield "tokenizer.path", "has another chat template than its rows were written with"
    has_same_text = saved.tokenizer == now.tokenizer and saved.template == now.template
    if has_same_text and _digests(saved) != _digests(now):
        yield "data.files", _changed_files(saved.files, now.files)


def is_other_data(saved: Origin | None, now: Origin, *, restarts: bool) -> bool:
    """Return whether a run resumes on other data than its checkpoint's.

    Args:
        saved: The description in the checkpoint; None: it has none.
        now: The description of the current data.
        restarts: Whether the run restarts at the first row of changed data. Otherwise data without
            a description counts as unchanged.
    """
    return restarts if saved is None else any(find_differences(saved, now))


def _digests(origin: Origin) -> list[str]:
    return [digest for _, digest in origin.files]


def _changed_files(saved: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> str:
    """Name the changed, missing and new files; without such files, report the changed order."""
    old, new = dict(saved), dict(now)
    parts = [
        _name_first([name for name in new if name in old and new[name] != old[name]], "changed"),
        _name_first([name for name in old if name not in new], "missing"),
        _name_first([name for name in new if name not in old], "new"),
    ]
    if changes := "; ".join(part for part in parts if part):
        return changes
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
    """Return a text with control characters escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def changed_data_issues(
    saved: Origin, now: Origin, *, checkpoint: Path, data: Any
) -> list[ConfigIssue]:
    """Return the differences from a checkpoint's rows as problems of a configuration.

    Args:
        saved: The description in the checkpoint.
        now: The description of the current data.
        checkpoint: Path of the checkpoint.
        data: Configuration of the data.
    """
    issues = []
    for key, message in find_differences(saved, now):
        value = getattr(data, key.removeprefix("data."), ...) if key.startswith("data.") else ...
        text = (
            f"{message} (in {checkpoint}, whose position counts other rows); use the same, or "
            "checkpoint.changed_data=restart to go on from the first row of this data"
        )
        issues.append(ConfigIssue(key, text, value))
    return issues
