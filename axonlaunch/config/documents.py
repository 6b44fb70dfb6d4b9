"""Typed configurations of datasets of text, a row of a file a document or a chat.

It holds values; ``axonlaunch.data`` reads what they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TextRowsConfig:
    """What documents and chats have in common: rows of files, tokenised once."""

    name: str
    """name in the registry of datasets"""
    files: list[str]
    """paths, globs or fsspec URLs of .jsonl, .json, .csv, .tsv, .parquet, .arrow and .txt, of which
    texts may be compressed as .gz, .bz2, .xz or .zst; folders that save_to_disk of datasets wrote
    """
    sequence_length: int = field(default=1024, metadata={"min": 1})
    """tokens of a row"""
    packing: Literal["concat", "best_fit", "none"] = "concat"
    """how rows are filled. concat: documents one after another, cut where a row ends; best_fit:
    whole documents, each in the fullest row that has room; none: one document a row. A document
    never attends to another
    """
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """what is done with a document longer than a row, under best_fit and none"""
    on_bad_row: Literal["error", "skip"] = "error"
    """what is done with a row that can't be read as one; skip counts them"""
    held_out: int | float | list[str] = field(default=0.01, metadata={"min": 0})
    """what is held out for evaluation: a share of the documents below 1, a number of them, or files
    of their own
    """
    cache_dir: str | None = None
    """folder that tokens are kept in; null: axonlaunch/tokens in the user's cache"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        found = []
        if not self.files:
            found.append(("files", "names no file; write data.files=['corpus/*.jsonl']"))
        if isinstance(self.held_out, float) and self.held_out >= 1:
            message = "a share must be below 1; write a whole number for so many documents"
            found.append(("held_out", message))
        return found


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
    packing: Literal["concat", "best_fit", "none"] = "best_fit"
    """how rows are filled. concat: chats one after another, cut where a row ends; best_fit: whole
    chats, each in the fullest row that has room; none: one chat a row. A chat never attends to
    another
    """
