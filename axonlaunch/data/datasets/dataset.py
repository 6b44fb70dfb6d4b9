"""The interface of datasets: samples by index, batches, and a record of optional facts.

Order, division among ranks and prefetching are up to ``data.datasets.loader``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import IGNORE_INDEX, Kind
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data.datasets.samples import CollatedSamples, Samples
from axonlaunch.data.datasets.shuffle import Indices
from axonlaunch.system.text.units import Counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.data.tokenizers.tokenizer import Tokenizer

__all__ = ["IGNORE_INDEX", "Batch", "Dataset", "DatasetInfo", "Kind", "DatasetWithoutText", "Split"]

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Batch:
    """A batch of samples as tensors.

    Attributes:
        inputs: Tokens [B, T] int64, or images [B, C, H, W] fp32.
        targets: [B, T] or [B] int64, ``IGNORE_INDEX`` where no target counts; or fp32 of any
            shape if a custom loss is used.
        positions: Position of each token in its document, [B, T] int64, for rows that hold several
            documents; a token attends only to tokens of its document. None: a row is one sequence.
        surplus: Number of rows at the end that no loss may count. They give every rank the same
            number of rows.
        present: Whether each token is not padding, [B, T] bool, for losses that count tokens
            without a target; None: no token is padding.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None
    surplus: int = 0
    present: Tensor | None = None

    @classmethod
    def from_numpy(
        cls,
        inputs: npt.NDArray[Any],
        targets: npt.NDArray[Any],
        positions: npt.NDArray[np.int64] | None = None,
        present: npt.NDArray[np.bool_] | None = None,
    ) -> Batch:
        """Wrap arrays, without a copy if their type allows it.

        Args:
            inputs: Tokens [B, T] int64, or images [B, C, H, W] float32.
            targets: [B, T] or [B] integers, or floats of any shape; converted to int64 and fp32.
            positions: Position of each token in its document, [B, T]; None: a row is one sequence.
            present: Whether each token is not padding, [B, T]; None: no token is padding.
        """
        import torch  # imported here: datasets are built and checked without torch

        dtype = np.float32 if np.issubdtype(targets.dtype, np.floating) else np.int64
        return cls(
            torch.from_numpy(inputs),
            torch.from_numpy(targets.astype(dtype, copy=False)),
            None if positions is None else torch.from_numpy(positions),
            present=None if present is None or present.all() else torch.from_numpy(present),
        )

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """Return one batch of the rows of several without surplus rows, in this order."""
        import torch

        if len(parts) == 1:
            return parts[0]
        positions = [part.positions for part in parts if part.positions is not None]
        present = [
            torch.ones_like(part.inputs, dtype=torch.bool) if part.present is None else part.present
            for part in parts
        ]
        return cls(
            torch.cat([part.inputs for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat(positions) if positions else None,
            present=torch.cat(present) if any(p.present is not None for p in parts) else None,
        )

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory, from which copies to a GPU overlap with work."""
        return self.map(lambda tensor: tensor.pin_memory())

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def full(self) -> dict[str, Tensor]:
        """The batch as passed to a custom loss."""
        named = {"inputs": self.inputs, "targets": self.targets}
        return named if self.positions is None else {**named, "positions": self.positions}

    @property
    def num_samples(self) -> int:
        """Number of samples, B."""
        return len(self)

    @property
    def is_counted(self) -> bool:
        """Whether any row counts in a loss."""
        return self.surplus < len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.full.values())

    def forward_arguments(self, module: nn.Module) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a forward: inputs and, for packed rows only, positions.

        A module that takes the mask of padding also gets it, if any.
        """
        named = {} if self.positions is None else {"positions": self.positions}
        if self.present is not None and takes_present(module):
            named["present"] = self.present
        return [self.inputs], named

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """Yield micro-batches of ``size`` samples, as views; the last may have fewer.

        Surplus rows are left out, except if a micro-batch has no other rows: every rank runs the
        same number of forwards.
        """
        for start in range(0, len(self), size):
            part = self.rows(start, start + size)
            counted = len(part) - part.surplus
            yield part.rows(0, counted) if 0 < counted < len(part) else part

    def ready(self, size: int) -> Batch:
        """Return this batch unchanged: its micro-batches are slices and need no preparation."""
        del size
        return self

    def uncounted(self, first: int, *, marks_targets: bool) -> Batch:
        """Return this batch with the rows from ``first`` on excluded from the loss.

        Args:
            first: Index of the first excluded row.
            marks_targets: Whether to set the targets of these rows to ``IGNORE_INDEX``, which a
                loss ignores. Otherwise the rows become surplus.
        """
        if not marks_targets:
            return replace(self, surplus=len(self) - first)
        targets = self.targets.clone()
        targets[first:] = IGNORE_INDEX
        return replace(self, targets=targets)

    def rows(self, start: int, stop: int) -> Batch:
        """Return the samples ``start`` to ``stop - 1``, as views."""
        part = self.map(lambda tensor: tensor[start:stop])
        counted = max(0, len(self) - self.surplus - start)
        return replace(part, surplus=max(0, len(part) - counted))

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch with a function applied to each tensor.

        Args:
            function: Called with inputs, targets and, if they exist, positions and ``present``. It
                must keep the first dim, B.
        """
        positions = None if self.positions is None else function(self.positions)
        present = None if self.present is None else function(self.present)
        inputs, targets = function(self.inputs), function(self.targets)
        return Batch(inputs, targets, positions, self.surplus, present)


AnyBatch = Batch | Samples
MicroBatch = Batch | CollatedSamples


class FileSums(NamedTuple):
    """Checksums of the training files, in order.

    Attributes:
        sums: (name, checksum) of each file.
        num_shards: Number of shards that the files cover; None: all.
    """

    sums: list[tuple[str, str]]
    num_shards: int | None = None


class Order(Protocol):
    """Custom order of samples."""

    def __call__(self, positions: Indices, *, seed: int) -> Indices:
        """Return the index of the sample at each global position, [n] int64."""


@dataclass(frozen=True)
class DatasetInfo:
    """Optional facts about a dataset. The defaults suit a dataset that needs none of them.

    Attributes:
        notes: Lines about the data that a run prints when it starts.
        is_packed: Whether rows hold several documents, so that batches have ``positions``.
        is_unsized: Whether the number of training samples is unknown; ``num_samples`` may be 0.
        float_targets: Shape of one sample's targets if they are floats, which need a custom loss;
            None: targets are classes or tokens.
        eval_parts: Named parts of the held-out samples, as ranges of their indices. A run reports
            the loss of each part.
        order: Order of training samples; None: shuffled by the seed, anew in each epoch.
        unigram_entropy: Computes the loss, in nats, of predicting held-out tokens from their
            frequency in the training data; None: unknown.
        file_sums: Computes checksums of the training files, by which a resumed run notices changed
            data. The argument is the number of shards to include, where shards are tokenized one
            after another; None: those tokenized so far.
        tokenizer: Tokenizer of the text; None for other data.
        tokenizing_ahead: Returns a context in which a separate process tokenizes the remaining
            shards; None: no data is tokenized during a run.
        counted: Unit that the loss counts, used in names of metrics; None: the kind of the inputs,
            and samples for structured ones.
    """

    notes: tuple[str, ...] = ()
    is_packed: bool = False
    is_unsized: bool = False
    float_targets: tuple[int, ...] | None = None
    eval_parts: Mapping[str, range] = field(default_factory=dict)
    order: Order | None = None
    unigram_entropy: Callable[[], float] | None = None
    file_sums: Callable[[int | None], FileSums] | None = None
    tokenizer: Tokenizer | None = None
    tokenizing_ahead: Callable[[TokenizerConfig], AbstractContextManager[object]] | None = None
    counted: Counted | None = None


class Dataset(Protocol):
    """Samples addressed by index, the same on every rank.

    A class with this interface is called with its typed configuration, imports no torch before the
    first sample, and raises ``ConfigError`` (a ``ValueError``) for input that it can't read.
    """

    @property
    def kind(self) -> Kind:
        """Kind of the inputs."""

    @property
    def num_samples(self) -> int:
        """Number of training samples; 0 for a stream of unknown length."""

    @property
    def num_eval_samples(self) -> int:
        """Number of held-out samples."""

    @property
    def num_classes(self) -> int:
        """Size of the target space: classes, or tokens of the vocabulary."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input: [T], or [C, H, W]."""

    @property
    def is_text(self) -> bool:
        """Whether ``encode`` and ``decode`` are supported."""

    @property
    def info(self) -> DatasetInfo:
        """Optional facts. A user's dataset may omit this member."""

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> AnyBatch:
        """Return the samples with these indices, in this order."""

    def encode(self, text: str) -> list[int]:
        """Convert text to tokens; only if ``is_text``."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text; only if ``is_text``."""


def counted_in(dataset: Dataset) -> Counted:
    """Return what a loss over a dataset counts: the unit that has one target."""
    if dataset.info.counted is not None:
        return dataset.info.counted
    return "samples" if dataset.kind == "structured" else dataset.kind


def sample_inputs(dataset: Dataset) -> Tensor:
    """Return a meta tensor with shape and type of one sample's inputs."""
    import torch

    dtype = torch.int64 if dataset.kind == "tokens" else torch.float32
    return torch.empty(dataset.sample_shape, dtype=dtype, device="meta")


def sample_targets(dataset: Dataset) -> Tensor:
    """Return a meta tensor with shape and type of one sample's targets."""
    import torch

    if (shape := dataset.info.float_targets) is not None:
        return torch.empty(shape, device="meta")
    shape = dataset.sample_shape if dataset.kind == "tokens" else ()
    return torch.empty(shape, dtype=torch.int64, device="meta")


def takes_present(module: nn.Module) -> bool:
    """Return whether the forward of a module takes the mask of padding, ``Batch.present``.

    Such modules have the attribute ``takes_present``, which is true.
    """
    return bool(getattr(module, "takes_present", False))


class DatasetWithoutText:
    """Base class for datasets that are not text, without optional facts."""

    is_text = False

    @property
    def info(self) -> DatasetInfo:
        """Default facts; override it as a property or a class attribute."""
        return DatasetInfo()

    def encode(self, text: str) -> list[int]:
        """Raise an error, because the dataset is not text.

        Raises:
            NotImplementedError: Always; check ``is_text`` first.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no text")

    def decode(self, tokens: Sequence[int]) -> str:
        """Raise an error, because the dataset is not text.

        Raises:
            NotImplementedError: Always; check ``is_text`` first.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no text")
