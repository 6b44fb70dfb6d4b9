"""A dataset that says the shape of its samples before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import axonlaunch as ax
from axonlaunch.config.options.data import SampleShape
from axonlaunch.data.datasets.dataset import Batch, DatasetWithoutText, Split


@dataclass(frozen=True, kw_only=True)
class SquaresConfig:
    """Sequences of squares modulo the vocabulary."""

    name: str = "squares"
    """name of the dataset"""
    sequence_length: int = field(default=8, metadata={"min": 1})
    """tokens of a sample"""
    vocab_size: int = field(default=64, metadata={"min": 2})
    """tokens of the vocabulary"""


def shape(config: SquaresConfig) -> SampleShape:
    """Return the shape of a sample."""
    return SampleShape(
        kind="tokens", shape=(config.sequence_length,), num_classes=config.vocab_size
    )


@ax.register_dataset("squares", config=SquaresConfig, sample=shape)
class Squares(DatasetWithoutText):
    """Squares of numbers that count up, modulo the vocabulary."""

    kind = "tokens"
    num_samples = 4096
    num_eval_samples = 64

    def __init__(self, config: SquaresConfig) -> None:
        self.num_classes = config.vocab_size
        self.sample_shape = (config.sequence_length,)

    def samples(self, indices: Sequence[int], *, split: Split) -> Batch:
        """Return the samples of these indices, in their order."""
        first = np.asarray(indices, dtype=np.int64)[:, None] + (10**6 if split == "eval" else 0)
        tokens = (first + np.arange(self.sample_shape[0] + 1)) ** 2 % self.num_classes
        return Batch.from_numpy(tokens[:, :-1], tokens[:, 1:])
