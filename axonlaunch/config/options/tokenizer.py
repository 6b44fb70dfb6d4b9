"""Typed configuration of the tokenizer; ``data.tokenizers.tokenizer`` loads or trains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer of text datasets."""

    name: Literal["auto", "bytes", "train"] = "auto"
    """auto: the tokenizer in path, else of model=hf, else bytes; bytes: one token per byte; train:
    a tokenizer with a chat template, learned once from the data and saved in the run folder
    """
    path: str | None = None
    """folder written by save_pretrained, a tokenizer.json, or a model id in the local cache of the
    Hugging Face Hub; null: selected by name
    """
    vocab_size: int = field(default=4096, metadata={"min": 300})
    """largest vocabulary of tokenizer=train, including bytes and special tokens"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        if self.name == "bytes" and self.path is not None:
            return [("path", "tokenizer=bytes reads no files; use tokenizer=auto, or null")]
        if self.name == "train" and self.path is not None:
            return [("path", "tokenizer=train reads no tokenizer; use tokenizer=auto, or null")]
        if self.path == "":
            return [("path", "is empty; write a folder, or null")]
        return []
