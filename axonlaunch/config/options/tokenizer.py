"""Typed configuration of the tokenizer; ``data.tokenizers.tokenizer`` loads or trains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from axonlaunch.config.problems.did_you_mean import unknown

SPECIAL = ("eos", "pad", "bos", "unk")
"""Names of tokens in ``tokenizer.special``."""


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
    add_tokens: list[str] = field(default_factory=list)
    """texts that become one token each. The embedding and the head of model=hf grow by rows at the
    mean of the others, and an adapter trains both
    """
    special: dict[str, str] = field(
        default_factory=dict,
        metadata={"allowed": "{eos: TOKEN, pad: TOKEN, bos: TOKEN, unk: TOKEN}"},
    )
    """tokens with a meaning, {eos: <|im_end|>, pad: <pad>}; a new one is added. eos ends each
    document, and the exported model stops at it
    """

    def new_tokens(self) -> list[str]:
        """Return the tokens that are added unless the tokenizer has them."""
        return [*dict.fromkeys((*self.add_tokens, *self.special.values()))]

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        problems = []
        for number, token in enumerate(self.add_tokens):
            if not token or token in self.add_tokens[:number]:
                reason = "is listed twice" if token else "is empty"
                problems.append(("add_tokens", f"its entry {number + 1} {reason}; remove it"))
        for name, token in self.special.items():
            if name not in SPECIAL:
                problems.append((f"special.{name}", unknown("special token", name, SPECIAL)))
            elif not token:
                problems.append((f"special.{name}", "is empty; write the text of a token"))
        if problems:
            return problems
        if self.name == "bytes" and self.new_tokens():
            key = "add_tokens" if self.add_tokens else "special"
            return [(key, "tokenizer=bytes has a fixed vocabulary; use tokenizer=auto or train")]
        if self.name == "bytes" and self.path is not None:
            return [("path", "tokenizer=bytes reads no files; use tokenizer=auto, or null")]
        if self.name == "train" and self.path is not None:
            return [("path", "tokenizer=train reads no tokenizer; use tokenizer=auto, or null")]
        if self.path == "":
            return [("path", "is empty; write a folder, or null")]
        return []
