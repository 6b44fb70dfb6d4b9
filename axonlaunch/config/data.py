"""Typed configurations of datasets.

It holds values; ``axonlaunch.data`` reads what they name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from axonlaunch.config.documents import ChatConfig, DocumentsConfig, TextRowsConfig
from axonlaunch.config.errors import target_problems
from axonlaunch.config.registry import Entry, Needs, Registry

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
    document_length: int | None = field(default=None, metadata={"min": 1})
    """tokens of a document, of which a row has as many as fit; null: a row is one sequence"""


@dataclass(frozen=True, kw_only=True)
class ShapeOnlyTokensConfig(SyntheticTokensConfig):
    """Rows of the same shape as those of text in files, which estimates do not read."""

    packing: str = "none"
    """``data.packing`` of the text"""


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


@dataclass(frozen=True, kw_only=True)
class CustomDataConfig:
    """A user's own dataset, named by where it is imported from."""

    name: str = "custom"
    """name in the registry of datasets"""
    target: str
    """what makes the dataset, package.module:Class; called with the arguments"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the target"""
    num_classes: int | None = field(default=None, metadata={"min": 1})
    """classes, or tokens of the vocabulary; null: as the dataset itself says"""
    eval_fraction: float = field(default=0.05, metadata={"min": 0, "below": 1})
    """share of a map-style dataset that is held out, its last samples; unless it has held_out"""
    collate: str | None = None
    """package.module:function of a list of samples; null: pairs are stacked, others as by torch"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        return target_problems(self.target, "Class")


@dataclass(frozen=True, kw_only=True)
class FreeDataConfig:
    """Configuration of a registered dataset that brought no dataclass of its own."""

    name: str
    """name in the registry of datasets"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the dataset"""


Kind = Literal["tokens", "images", "structured"]


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """What one sample is, as far as memory and time depend on it."""

    kind: Kind
    """tokens are int64, images fp32; structured are batches of any structure"""
    shape: tuple[int, ...]
    """of one input, [T] or [C, H, W]"""
    num_classes: int | None = None
    """tokens of the vocabulary, or classes; None: only the data knows"""
    is_packed: bool = False
    """whether a row holds several documents, which a mask keeps apart"""


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What others must know of a dataset without reading it."""

    sample: Callable[[Any], SampleShape] | None = None
    """from its configuration; None: the dataset is made to find out"""
    files: tuple[str, ...] = ()
    """required keys that name files, which an estimate does without"""
    is_text: bool = False
    """whether its tokens are text"""
    takes_tokenizer: bool = False
    """whether it is called with a tokenizer too; otherwise text is bytes"""
    collate: Callable[[list[Any]], Any] | None = None
    """makes a batch of samples, where the dataset itself gives one by one"""


def _bytes(config: PythonSourceConfig | TextConfig) -> SampleShape:
    return SampleShape(kind="tokens", shape=(config.sequence_length,), num_classes=NUM_BYTES)


def _tokens(config: TokensConfig | SyntheticTokensConfig) -> SampleShape:
    return SampleShape(
        kind="tokens",
        shape=(config.sequence_length,),
        num_classes=config.vocab_size,
        is_packed=getattr(config, "document_length", None) is not None,
    )


def _text_rows(config: TextRowsConfig) -> SampleShape:
    shape = (config.sequence_length,)
    return SampleShape(kind="tokens", shape=shape, is_packed=config.packing != "none")


def _images(config: SyntheticImagesConfig) -> SampleShape:
    shape = (config.num_channels, config.image_size, config.image_size)
    return SampleShape(kind="images", shape=shape, num_classes=config.num_classes)


def _digits(config: DigitsConfig) -> SampleShape:
    shape = (1, config.image_size, config.image_size)
    return SampleShape(kind="images", shape=shape, num_classes=10)


DATASETS: Registry[Callable[[Any], Any], DatasetFacts] = Registry(
    "dataset",
    {
        "python_source": Entry(
            "axonlaunch.data.python_source:PythonSource",
            "source of Python's standard library",
            PythonSourceConfig,
            DatasetFacts(sample=_bytes, is_text=True),
        ),
        "text": Entry(
            "axonlaunch.data.text:Text",
            "your own files as bytes, data.files",
            TextConfig,
            DatasetFacts(sample=_bytes, files=("files",), is_text=True),
        ),
        "documents": Entry(
            "axonlaunch.data.mix:build_text",
            "text of rows in files, tokenised: jsonl, csv, parquet, data.files",
            DocumentsConfig,
            DatasetFacts(sample=_text_rows, files=("files",), is_text=True, takes_tokenizer=True),
        ),
        "chat": Entry(
            "axonlaunch.data.mix:build_text",
            "messages of rows in files, by the chat template of a tokenizer, data.files",
            ChatConfig,
            DatasetFacts(sample=_text_rows, files=("files",), is_text=True, takes_tokenizer=True),
        ),
        "tokens": Entry(
            "axonlaunch.data.tokens:TokenFile",
            "uint16 or uint32 tokens, memory-mapped, data.path",
            TokensConfig,
            DatasetFacts(sample=_tokens, files=("path",)),
        ),
        "synthetic_tokens": Entry(
            "axonlaunch.data.synthetic:SyntheticTokens",
            "made-up sequences that count up",
            SyntheticTokensConfig,
            DatasetFacts(sample=_tokens),
        ),
        "synthetic_images": Entry(
            "axonlaunch.data.synthetic:SyntheticImages",
            "made-up images, a noisy pattern a class",
            SyntheticImagesConfig,
            DatasetFacts(sample=_images),
        ),
        "digits": Entry(
            "axonlaunch.data.digits:Digits",
            "1797 real handwritten digits",
            DigitsConfig,
            DatasetFacts(sample=_digits),
            needs=Needs("sklearn", "scikit-learn", "axonlaunch[digits]"),
        ),
        "custom": Entry(
            "axonlaunch.data.custom:build_custom_dataset",
            "your own dataset, data.target",
            CustomDataConfig,
            DatasetFacts(),
        ),
    },
    entry_points="axonlaunch.datasets",
    free_config=FreeDataConfig,
)
