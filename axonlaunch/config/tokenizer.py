"""Typed configuration of what turns text into tokens.

It holds values; ``axonlaunch.data.tokenizer`` reads what they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What turns text into tokens, for data that is text."""

    name: Literal["auto", "bytes", "train"] = "auto"
    """auto: that of path, else that of model=hf's folder, else bytes; bytes: a token a byte; train:
    learned from the data, once, with a chat template, and kept in the run folder
    """
    path: str | None = None
    """folder with a tokenizer.json as save_pretrained writes it, that file alone, or a model id in
    the cache of the Hugging Face Hub; null: as name says
    """
    vocab_size: int = field(default=4096, metadata={"min": 300})
    """tokens that tokenizer=train learns at most, bytes and special ones included"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if self.name == "bytes" and self.path is not None:
            return [("path", "tokenizer=bytes reads no files; use tokenizer=auto, or null")]
        if self.name == "train" and self.path is not None:
            return [("path", "tokenizer=train reads no tokenizer; use tokenizer=auto, or null")]
        if self.path == "":
            return [("path", "is empty; write a folder, or null")]
        return []
