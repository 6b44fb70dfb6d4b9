"""Typed configurations of datasets.

It holds values; ``axonlaunch.data`` reads what they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

IGNORE_INDEX: Final = -100
"""The target that a loss does not count: torch's own default for ``ignore_index``."""
NUM_BYTES: Final = 256
"""The vocabulary of text, a token a byte."""


@dataclass(frozen=True, kw_only=True)
class PythonSourceConfig:
    """The source of Python's own standard library, as bytes."""

    name: str = "python_source"
    """name in the registry of datasets"""
    sequence_length: int = field(default=128, metadata={"min": 1})
    """bytes of a sample"""
    eval_fraction: float = field(default=0.05, metadata={"above": 0, "below": 1})
    """share of the files held out for evaluation"""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A user's own files, as bytes."""

    name: str = "text"
    """name in the registry of datasets"""
    files: list[str]
    """paths or globs of text in UTF-8; ** crosses folders"""
    sequence_length: int = field(default=128, metadata={"min": 1})
    """bytes of a sample"""
    eval_fraction: float = field(default=0.05, metadata={"above": 0, "below": 1})
    """share of the bytes held out for evaluation: the last ones"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if self.files:
            return []
        return [("files", "names no file; write data.files=[notes.txt,'corpus/**/*.md']")]


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """A flat binary file of token numbers, memory-mapped."""

    name: str = "tokens"
    """name in the registry of datasets"""
    path: str
    """file of token numbers, nothing else in it"""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """type of a number in the file, in this node's byte order"""
    sequence_length: int = field(default=1024, metadata={"min": 1})
    """tokens of a sample"""
    vocab_size: int | None = field(default=None, metadata={"min": 1})
    """size of the vocabulary; null: found by reading the files through once"""
    eval_path: str | None = None
    """file of held-out tokens; null: the last part of path"""
    eval_fraction: float = field(default=0.01, metadata={"above": 0, "below": 1})
    """share of path held out for evaluation where eval_path is null"""


@dataclass(frozen=True, kw_only=True)
class SyntheticTokensConfig:
    """Made-up token sequences that count up by a stride: cheap, and learnable."""

    name: str = "synthetic_tokens"
    """name in the registry of datasets"""
    vocab_size: int = field(default=256, metadata={"min": 2})
    """tokens of the vocabulary"""
    sequence_length: int = field(default=128, metadata={"min": 1})
    """tokens of a sample"""
    num_samples: int = field(default=65536, metadata={"min": 1})
    """training samples"""
    num_eval_samples: int = field(default=1024, metadata={"min": 1})
    """evaluation samples"""


@dataclass(frozen=True, kw_only=True)
class SyntheticImagesConfig:
    """Made-up images, one noisy pattern a class: cheap, and learnable."""

    name: str = "synthetic_images"
    """name in the registry of datasets"""
    image_size: int = field(default=28, metadata={"min": 1})
    """height and width, pixels"""
    num_channels: int = field(default=1, metadata={"min": 1})
    """channels: 1 grey, 3 colour"""
    num_classes: int = field(default=10, metadata={"min": 1})
    """number of classes"""
    num_samples: int = field(default=65536, metadata={"min": 1})
    """training samples"""
    num_eval_samples: int = field(default=1024, metadata={"min": 1})
    """evaluation samples"""


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """1797 real handwritten digits that ship with scikit-learn."""

    name: str = "digits"
    """name in the registry of datasets"""
    image_size: int = field(default=28, metadata={"min": 8})
    """height and width to which the 8 x 8 pixels are enlarged; 28 suits the default mlp and vit"""
    eval_fraction: float = field(default=0.2, metadata={"above": 0, "below": 1})
    """share of the images held out for evaluation"""


DATA_CONFIGS: dict[str, type] = {
    "python_source": PythonSourceConfig,
    "text": TextConfig,
    "tokens": TokensConfig,
    "synthetic_tokens": SyntheticTokensConfig,
    "synthetic_images": SyntheticImagesConfig,
    "digits": DigitsConfig,
}
