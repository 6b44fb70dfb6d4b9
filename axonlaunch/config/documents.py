"""Typed configurations of datasets of text, a row of a file a document or a chat.

It holds values; ``axonlaunch.data`` reads what they name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

_OF_THE_MIX = {"of_all_groups": True}
"""Of a key that is one for all sources of a mix."""


def _schema_of(options: dict[str, Any], schema: type) -> type:
    """Return the dataclass of a source's options: of its kind, or of the mix's."""
    kinds = {"documents": DocumentsConfig, "chat": ChatConfig}
    return kinds.get(str(options.get("data")), schema)


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """How much of a mix is of a source, and of which kind it is."""

    data: Literal["documents", "chat"] | None = None
    """what the rows are, as data=documents and data=chat read them; null: what those of the mix
    are
    """
    weight: float | None = field(default=None, metadata={"above": 0})
    """share of the rows, beside the weights of the other sources; the mix is as long as it takes to
    see each row once
    """
    epochs: float | None = field(default=None, metadata={"above": 0})
    """how often each row is seen while the mix is seen once, where there are no weights; null: 1"""


@dataclass(frozen=True, kw_only=True)
class TextRowsConfig:
    """What documents and chats have in common: rows of files, tokenised once."""

    name: str
    """name in the registry of datasets"""
    files: list[str] = field(default_factory=list)
    """paths, globs or fsspec URLs of .jsonl, .json, .csv, .tsv, .parquet, .arrow and .txt, of which
    texts may be compressed as .gz, .bz2, .xz or .zst; folders that save_to_disk of datasets wrote
    """
    mix: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata={
            "groups": SourceShare,
            "schema_of": _schema_of,
            "allowed": "{NAME: {files: [...], weight: ..., ...}}",
        },
    )
    """sources in place of files, by a name: each has its files, its weight or epochs, as data what
    its rows are where the mix's are others, and what keys of data it wants to be other than the
    mix's
    """
    sequence_length: int = field(default=1024, metadata={"min": 1, **_OF_THE_MIX})
    """tokens of a row"""
    packing: Literal["auto", "concat", "best_fit", "none"] = field(
        default="concat", metadata=_OF_THE_MIX
    )
    """how rows are filled. concat: documents one after another, cut where a row ends; best_fit:
    whole documents, each in the fullest row that has room; auto: best_fit, but few documents are
    spread over 64 rows, and for a model that can't keep documents apart it is none; none: one
    document a row. A document never attends to another
    """
    shuffle: Literal["all", "shards"] = field(default="all", metadata=_OF_THE_MIX)
    """in what order rows are seen. all: shuffled over all files, which are tokenised before the run
    starts; shards: files one after another, some 16 MB at a time, shuffled among these, so that a
    run starts when the first of them are tokenised, and the others are meanwhile
    """
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """what is done with a document longer than a row, under best_fit and none"""
    on_bad_row: Literal["error", "skip"] = "error"
    """what is done with a row that can't be read as one; skip counts them"""
    held_out: int | float | list[str] = field(default=0.01, metadata={"min": 0})
    """what is held out for evaluation: a share of the documents below 1, a number of them, or files
    of their own
    """
    cache_dir: str | None = field(default=None, metadata=_OF_THE_MIX)
    """folder that tokens are kept in; null: axonlaunch/tokens in the user's cache"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        problems = []
        if not self.files and not self.mix:
            problems.append(("files", "names no file; write data.files=['corpus/*.jsonl']"))
        if self.files and self.mix:
            problems.append(("files", "data.mix names the files of each source; use one of them"))
        if self.mix and self.shuffle == "shards":
            message = "data.mix is shuffled over all its sources; use all, or data.files"
            problems.append(("shuffle", message))
        shares = self.shares()
        weighted = [name for name, share in shares.items() if share.weight is not None]
        if weighted and len(weighted) < len(shares):
            other = next(name for name in shares if name not in weighted)
            problems.append((f"mix.{other}", f"has no weight, and {weighted[0]} has; give it one"))
        if weighted and any(share.epochs is not None for share in shares.values()):
            message = "has weights and epochs, which follow from each other; use one of them"
            problems.append(("mix", message))
        for name, source in self.sources().items():
            problems += [(f"mix.{name}.{key}", message) for key, message in source.problems()]
        if isinstance(self.held_out, float) and self.held_out >= 1:
            message = "a share must be below 1; write a whole number for so many documents"
            problems.append(("held_out", message))
        return problems

    def sources(self) -> dict[str, TextRowsConfig]:
        """Return the configuration of each source of a mix, as that of a dataset of its own."""
        return {name: self._source(options) for name, options in self.mix.items()}

    def _source(self, options: dict[str, Any]) -> TextRowsConfig:
        schema = _schema_of(options, type(self))
        shares = {share.name for share in dataclasses.fields(SourceShare)}
        own = {name: value for name, value in options.items() if name not in shares}
        common = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(schema)
            if field.name != "name" and hasattr(self, field.name)
        }
        source: TextRowsConfig = schema(**{**common, "mix": {}, "files": [], **own})
        return source

    def shares(self) -> dict[str, SourceShare]:
        """Return how much of a mix each source is."""
        return {
            name: SourceShare(weight=options.get("weight"), epochs=options.get("epochs"))
            for name, options in self.mix.items()
        }


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig(TextRowsConfig):
    """Documents: a text field of rows in files, tokenised once."""

    name: str = "documents"
    """name in the registry of datasets"""
    text_field: str = "text"
    """name of the field or column that holds the text"""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(TextRowsConfig):
    """Chats: messages in rows of files, written out by the tokenizer's chat template."""

    name: str = "chat"
    """name in the registry of datasets"""
    messages_field: str | None = None
    """name of the field that holds the messages; null: messages (role, content) or conversations
    (from, value), else a row is prompt and completion, or instruction, input and output
    """
    train_on: Literal["assistant", "all"] = "assistant"
    """which tokens the loss counts. assistant: what the assistant says, by the generation marks of
    the template or else by what each of its turns adds; all: every token but the first
    """
    packing: Literal["auto", "concat", "best_fit", "none"] = field(
        default="auto", metadata=_OF_THE_MIX
    )
    """how rows are filled. concat: chats one after another, cut where a row ends; best_fit: whole
    chats, each in the fullest row that has room; auto: best_fit, but few chats are spread over 64
    rows, so that they are more than a batch, and for a model that can't keep chats apart it is
    none; none: one chat a row. A chat never attends to another
    """
