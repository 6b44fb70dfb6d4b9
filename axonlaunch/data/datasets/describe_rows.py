"""Describes the training rows of a dataset, for a checkpoint and for the run that resumes from it.

Of a user-defined dataset only the name is known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from axonlaunch.config.options.data import DATASETS, CustomDataConfig
from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.schema import RunConfig
from axonlaunch.data.datasets.dataset import Dataset, FileSums
from axonlaunch.data.datasets.origin import Origin, printable

_NOT_OF_ROWS = (
    *("files", "path", "cache_dir", "on_bad_row", "eval_path"),
    *("subset", "split", "validation_split"),
)
"""Options that name files, which are described by their content, or that change no row."""
_LISTED = 10_000
"""Maximum number of files that are described individually; more are described in groups."""


def describe_rows(config: RunConfig, dataset: Dataset, *, like: Origin | None = None) -> Origin:
    """Describe the source of a run's training rows; of a user-defined dataset, its name.

    Args:
        config: Configuration of the run.
        dataset: Dataset of ``config.options.data``.
        like: An earlier description. If shards are tokenized one after another, the shards in it
            are described; None: those tokenized so far.
    """
    if not DATASETS.is_included(config.data.name) or isinstance(config.data, CustomDataConfig):
        return Origin(files=(), options={"name": config.data.name})
    info = dataset.info
    sources = config.data.sources() if isinstance(config.data, TextRowsConfig) else {}
    is_chat = config.data.name == "chat" or any(
        source.name == "chat" for source in sources.values()
    )
    shards = None if like is None else like.shards or sys.maxsize
    sums, covered = FileSums([]) if info.file_sums is None else info.file_sums(shards)
    return Origin(
        files=tuple(_in_groups([(printable(name), digest) for name, digest in sums])),
        options=_options(config.data),
        tokenizer="" if info.tokenizer is None else info.tokenizer.fingerprint,
        template=info.tokenizer.template_fingerprint if is_chat and info.tokenizer else "",
        shards=covered,
    )


def _options(data: Any) -> dict[str, Any]:
    """Return the options that decide the rows, as JSON values."""
    options = _row_options({f.name: getattr(data, f.name) for f in dataclasses.fields(data)})
    if "mix" in options:
        options["mix"] = {name: _row_options(source) for name, source in options["mix"].items()}
    json_options: dict[str, Any] = json.loads(json.dumps(options))
    return json_options


def _row_options(options: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in options.items() if key not in _NOT_OF_ROWS}
    if options.get("validation_split") or not isinstance(options.get("held_out", 0), int | float):
        kept["held_out"] = "files"
    return kept


def _in_groups(files: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield entries for at most ``_LISTED`` files, or for groups of consecutive files."""
    together = -(-len(files) // _LISTED)
    if together <= 1:
        yield from files
        return
    for start in range(0, len(files), together):
        group = files[start : start + together]
        names = f"{group[0][0]} to {group[-1][0]}"
        yield names, hashlib.sha256("".join(digest for _, digest in group).encode()).hexdigest()
