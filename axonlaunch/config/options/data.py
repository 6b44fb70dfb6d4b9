"""Typed configurations of datasets, and the registry of datasets.

``axonlaunch.data`` reads the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from axonlaunch.config.options.documents import ChatConfig, DocumentsConfig, TextRowsConfig
from axonlaunch.config.problems.errors import target_problems
from axonlaunch.config.registry import Entry, Needs, RegisteredConfig, Registry

IGNORE_INDEX: Final = -100
"""Target that the loss ignores; torch's default for ``ignore_index``."""
NUM_BYTES: Final = 256
"""Vocabulary size of text that is read as bytes."""


@dataclass(frozen=True, kw_only=True)
class PythonSourceConfig:
    """Source code of Python's standard library, as bytes."""

    name: str = "python_source"
    """name of the dataset"""
    sequence_length: int = field(default=128, metadata={"min": 1})
    """bytes per sample"""
    eval_fraction: float = field(default=0.05, metadata={"above": 0, "below": 1})
    """fraction of the files that is held out for evaluation"""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """User-defined text files, as bytes."""

    name: str = "text"
    """name of the dataset"""
    files: list[str]
    """paths or globs of UTF-8 text files; ** matches any depth of folders"""
    sequence_length: int = field(default=128, metadata={"min": 1})
    """bytes per sample"""
    eval_fraction: float = field(default=0.05, metadata={"above": 0, "below": 1})
    """fraction of the bytes, at the end, that is held out for evaluation"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        if self.files:
            return []
        return [("files", "names no file; write data.files=[notes.txt,'corpus/**/*.md']")]


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Flat binary file of token numbers, memory-mapped."""

    name: str = "tokens"
    """name of the dataset"""
    path: str
    """file that contains only token numbers, without a header"""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """dtype of the token numbers, in the byte order of this node"""
    sequence_length: int = field(default=1024, metadata={"min": 1})
    """tokens per sample"""
    vocab_size: int | None = field(default=None, metadata={"min": 1})
    """size of the vocabulary; null: found by reading the files once"""
    eval_path: str | None = None
    """file of held-out tokens; null: the end of path"""
    eval_fraction: float = field(default=0.01, metadata={"above": 0, "below": 1})
    """fraction of path that is held out for evaluation if eval_path is null"""


@dataclass(frozen=True, kw_only=True)
class SyntheticTokensConfig:
    """Synthetic token sequences that count up by a stride; cheap, and learnable."""

    name: str = "synthetic_tokens"
    """name of the dataset"""
    vocab_size: int = field(default=256, metadata={"min": 2})
    """size of the vocabulary"""
    sequence_length: int = field(default=128, metadata={"min": 1})
    """tokens per sample"""
    num_samples: int = field(default=65536, metadata={"min": 1})
    """number of training samples"""
    num_eval_samples: int = field(default=1024, metadata={"min": 1})
    """number of evaluation samples"""
    document_length: int | None = field(default=None, metadata={"min": 1})
    """tokens per document; rows are packed with documents; null: each row is one sequence"""


@dataclass(frozen=True, kw_only=True)
class ShapeOnlyTokensConfig(SyntheticTokensConfig):
    """Stand-in for text files in estimates: rows of the same shape, without reading files."""

    packing: str = "none"
    """``data.datasets.packing`` of the text dataset"""


@dataclass(frozen=True, kw_only=True)
class SyntheticImagesConfig:
    """Synthetic images, one noisy pattern per class; cheap, and learnable."""

    name: str = "synthetic_images"
    """name of the dataset"""
    image_size: int = field(default=28, metadata={"min": 1})
    """height and width, pixels"""
    num_channels: int = field(default=1, metadata={"min": 1})
    """number of channels: 1 gray, 3 color"""
    num_classes: int = field(default=10, metadata={"min": 1})
    """number of classes"""
    num_samples: int = field(default=65536, metadata={"min": 1})
    """number of training samples"""
    num_eval_samples: int = field(default=1024, metadata={"min": 1})
    """number of evaluation samples"""


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """1797 real handwritten digits that ship with scikit-learn."""

    name: str = "digits"
    """name of the dataset"""
    image_size: int = field(default=28, metadata={"min": 8})
    """height and width to which the 8 x 8 pixels are enlarged; mlp and vit expect 28 by default"""
    eval_fraction: float = field(default=0.2, metadata={"above": 0, "below": 1})
    """fraction of the images that is held out for evaluation"""


@dataclass(frozen=True, kw_only=True)
class CustomDataConfig:
    """User-defined dataset, named by its import path."""

    name: str = "custom"
    """name of the dataset"""
    target: str
    """import path of the dataset, package.module:Class; it is called with the arguments"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the target"""
    num_classes: int | None = field(default=None, metadata={"min": 1})
    """number of classes, or size of the vocabulary; null: read from the dataset"""
    eval_fraction: float = field(default=0.05, metadata={"min": 0, "below": 1})
    """fraction at the end of a map-style dataset to hold out; unused if the dataset has held_out"""
    collate: str | None = None
    """function that batches samples, package.module:function; null: stacks pairs, else torch's"""
    workers: int = field(default=0, metadata={"min": 0})
    """processes per rank that read samples ahead; 0: the rank reads them when a step needs them"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        return target_problems(self.target, "Class")


@dataclass(frozen=True, kw_only=True)
class FreeDataConfig(RegisteredConfig):
    """Configuration of a dataset that was registered without a dataclass."""

    workers: int = field(default=0, metadata={"min": 0})
    """processes per rank that read samples ahead; 0: the rank reads them when a step needs them"""


Kind = Literal["tokens", "images", "structured"]


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """Properties of one sample that memory and time depend on."""

    kind: Kind
    """kind of input: tokens are int64, images fp32, structured is any structure of tensors"""
    shape: tuple[int, ...]
    """shape of one input, [T] or [C, H, W]"""
    num_classes: int | None = None
    """size of the vocabulary, or number of classes; None if only the data can tell"""
    is_packed: bool = False
    """whether a row holds several documents, separated by an attention mask"""


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """Properties of a dataset that are known without reading it."""

    sample: Callable[[Any], SampleShape] | None = None
    """function from the configuration to the sample shape; None: the built dataset tells it"""
    files: tuple[str, ...] = ()
    """required keys that name files; estimates work without them"""
    is_text: bool = False
    """whether the tokens represent text"""
    takes_tokenizer: bool = False
    """whether the dataset is built with a tokenizer; otherwise text is read as bytes"""
    collate: Callable[[list[Any]], Any] | None = None
    """function that batches single samples; None if the dataset returns batches"""


def _bytes(config: PythonSourceConfig | TextConfig) -> SampleShape:
    return SampleShape(kind="tokens", shape=(config.sequence_length,), num_classes=NUM_BYTES)


def _tokens(config: TokensConfig | SyntheticTokensConfig) -> SampleShape:
    return SampleShape(
        kind="tokens",
        shape=(config.sequence_length,),
        num_classes=config.vocab_size,
        is_packed=isinstance(config, SyntheticTokensConfig) and config.document_length is not None,
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
            "axonlaunch.data.included.python_source:PythonSource",
            "source code of Python's standard library",
            PythonSourceConfig,
            DatasetFacts(sample=_bytes, is_text=True),
        ),
        "text": Entry(
            "axonlaunch.data.included.text:Text",
            "your files as bytes, data.files",
            TextConfig,
            DatasetFacts(sample=_bytes, files=("files",), is_text=True),
        ),
        "documents": Entry(
            "axonlaunch.data.texts.mix:build_text",
            "text in rows of files, tokenized: jsonl, csv, parquet, data.files",
            DocumentsConfig,
            DatasetFacts(sample=_text_rows, files=("files",), is_text=True, takes_tokenizer=True),
        ),
        "chat": Entry(
            "axonlaunch.data.texts.mix:build_text",
            "chat messages in rows of files, by the tokenizer's chat template, data.files",
            ChatConfig,
            DatasetFacts(sample=_text_rows, files=("files",), is_text=True, takes_tokenizer=True),
        ),
        "tokens": Entry(
            "axonlaunch.data.included.tokens:TokenFile",
            "uint16 or uint32 tokens, memory-mapped, data.path",
            TokensConfig,
            DatasetFacts(sample=_tokens, files=("path",)),
        ),
        "synthetic_tokens": Entry(
            "axonlaunch.data.included.synthetic:SyntheticTokens",
            "synthetic sequences that count up",
            SyntheticTokensConfig,
            DatasetFacts(sample=_tokens),
        ),
        "synthetic_images": Entry(
            "axonlaunch.data.included.synthetic:SyntheticImages",
            "synthetic images, one noisy pattern per class",
            SyntheticImagesConfig,
            DatasetFacts(sample=_images),
        ),
        "digits": Entry(
            "axonlaunch.data.included.digits:Digits",
            "1797 real handwritten digits",
            DigitsConfig,
            DatasetFacts(sample=_digits),
            needs=Needs("sklearn", "scikit-learn", "axonlaunch[digits]"),
        ),
        "custom": Entry(
            "axonlaunch.data.datasets.user_datasets.custom:build_custom_dataset",
            "your dataset, data.target",
            CustomDataConfig,
            DatasetFacts(),
        ),
    },
    entry_points="axonlaunch.datasets",
    free_config=FreeDataConfig,
)
