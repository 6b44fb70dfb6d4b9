"""What a dataset offers: samples by index, and what space their targets live in.

It holds the form; order, sharing and prefetching are the loader's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from axonlaunch.config.data import IGNORE_INDEX, Kind
from axonlaunch.data.samples import CollatedSamples, Samples

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORE_INDEX", "Batch", "Dataset", "Kind", "NoText", "Split"]

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Batch:
    """Samples side by side.

    Attributes:
        inputs: Tokens [B, T] int64, or images [B, C, H, W] fp32.
        targets: [B, T] or [B] int64, ``IGNORE_INDEX`` where nothing counts; or fp32 of any shape,
            of which a loss of one's own knows what they mean.
        positions: Of each token in its document, [B, T] int64, for rows that hold several; a token
            attends to those of its own document alone. None: a row is one sequence.
        surplus: Rows at the end that no loss is to see: they give every rank as many.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None
    surplus: int = 0

    @classmethod
    def from_numpy(
        cls,
        inputs: npt.NDArray[Any],
        targets: npt.NDArray[Any],
        positions: npt.NDArray[np.int64] | None = None,
    ) -> Batch:
        """Wrap arrays without a copy where their type allows it.

        Args:
            inputs: Tokens [B, T] int64, or images [B, C, H, W] float32.
            targets: [B, T] or [B], of any type of integers, or floats of any shape; those of others
                than int64 and fp32 are copied to these.
            positions: [B, T], of each token in its document; None: a row is one sequence.
        """
        import torch  # here, so that datasets can be made and checked without torch

        dtype = np.float32 if np.issubdtype(targets.dtype, np.floating) else np.int64
        return cls(
            torch.from_numpy(inputs),
            torch.from_numpy(targets.astype(dtype, copy=False)),
            None if positions is None else torch.from_numpy(positions),
        )

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory, from which copies to a GPU overlap with work."""
        return self.map(lambda tensor: tensor.pin_memory())

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def whole(self) -> dict[str, Tensor]:
        """What a loss of one's own sees."""
        named = {"inputs": self.inputs, "targets": self.targets}
        return named if self.positions is None else {**named, "positions": self.positions}

    @property
    def num_samples(self) -> int:
        """How many samples there are, B."""
        return len(self)

    @property
    def is_counted(self) -> bool:
        """Whether a row of it counts; of targets each says so for itself."""
        return self.surplus < len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors together."""
        return sum(tensor.nbytes for tensor in self.whole.values())

    def forward_arguments(self, forward: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what a forward is called with: inputs, and positions in packed rows alone."""
        del forward
        return [self.inputs], {} if self.positions is None else {"positions": self.positions}

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """Yield ``size`` samples at a time, as views; the last may have fewer.

        Surplus is left out, where it is not all: every rank does as many forwards.
        """
        for start in range(0, len(self), size):
            part = self.rows(start, start + size)
            counted = len(part) - part.surplus
            yield part.rows(0, counted) if 0 < counted < len(part) else part

    def ready(self, size: int) -> Batch:
        """Return the same, of which micro-batches are slices."""
        del size
        return self

    def uncounted(self, first: int, *, marks_targets: bool) -> Batch:
        """Return the same, of which rows from ``first`` on do not count.

        Args:
            first: Of these rows.
            marks_targets: Whether their targets become ``IGNORE_INDEX``, which a loss passes over;
                they are surplus else.
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
        """Return a batch of what a function makes of each tensor.

        Args:
            function: Called with inputs, targets and, where there are some, positions; what it
                returns has the same first dim, B.
        """
        positions = None if self.positions is None else function(self.positions)
        return Batch(function(self.inputs), function(self.targets), positions, self.surplus)


AnyBatch = Batch | Samples
MicroBatch = Batch | CollatedSamples


class Dataset(Protocol):
    """Samples addressed by index, the same on every rank.

    A class of this form is called with its typed configuration, imports no torch before the first
    sample, and raises ``ConfigError`` (a ``ValueError``) for what it can't read.
    """

    @property
    def kind(self) -> Kind:
        """What the inputs are."""

    @property
    def num_samples(self) -> int:
        """Training samples; 0: a stream that does not say."""

    @property
    def num_eval_samples(self) -> int:
        """Held-out samples."""

    @property
    def num_classes(self) -> int:
        """Size of the target space: classes, or tokens of the vocabulary."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input: [T], or [C, H, W]."""

    @property
    def is_text(self) -> bool:
        """Whether ``encode`` and ``decode`` have a meaning."""

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> AnyBatch:
        """Return the samples of these indices, in their order."""

    def encode(self, text: str) -> list[int]:
        """Turn text into tokens; only where ``is_text``."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text; only where ``is_text``."""


def sample_inputs(dataset: Dataset) -> Tensor:
    """Return one sample's inputs, shape and type alone."""
    import torch

    dtype = torch.int64 if dataset.kind == "tokens" else torch.float32
    return torch.empty(dataset.sample_shape, dtype=dtype, device="meta")


def sample_targets(dataset: Dataset) -> Tensor:
    """Return one sample's targets, shape and type alone."""
    import torch

    if (shape := float_targets(dataset)) is not None:
        return torch.empty(shape, device="meta")
    shape = dataset.sample_shape if dataset.kind == "tokens" else ()
    return torch.empty(shape, dtype=torch.int64, device="meta")


def float_targets(dataset: Dataset) -> tuple[int, ...] | None:
    """Return the shape of a sample's targets where they are no classes; None: they are classes."""
    shape: tuple[int, ...] | None = getattr(dataset, "float_targets", None)
    return shape


def holds_documents(dataset: Dataset) -> bool:
    """Say whether rows hold several documents, so that batches have positions."""
    return bool(getattr(dataset, "is_packed", False))


def is_unsized(dataset: Dataset) -> bool:
    """Say whether it is not known how many samples there are to train on."""
    return bool(getattr(dataset, "is_unsized", False))


def file_sums(
    dataset: Dataset, *, shards: int | None = None
) -> tuple[list[tuple[str, str]], int | None]:
    """Return (name, checksum) of the files that training rows are made of, in order.

    Args:
        dataset: An included one; some have no files.
        shards: Number of shards to look at, of data whose shards are tokenised one by one; None:
            those that are tokenised by now.

    Returns:
        The checksums, and how many shards they cover; None: all.
    """
    sums = getattr(dataset, "file_sums", None)
    if sums is None:
        return [], None
    if is_unsized(dataset):
        found: tuple[list[tuple[str, str]], int | None] = sums(shards)
        return found
    return sums(), None


class NoText:
    """The text side of a dataset that has none."""

    is_text = False

    def encode(self, text: str) -> list[int]:
        """Refuse.

        Raises:
            NotImplementedError: Always; ``is_text`` says so before.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no text")

    def decode(self, tokens: Sequence[int]) -> str:
        """Refuse.

        Raises:
            NotImplementedError: Always; ``is_text`` says so before.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no text")
