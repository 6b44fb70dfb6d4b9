"""Synthetic samples, computed from their index, for tests and benchmarks; a model can learn them.

No file is read, and memory use does not depend on the number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import SyntheticImagesConfig, SyntheticTokensConfig
from axonlaunch.data.datasets.dataset import Batch, DatasetInfo, DatasetWithoutText, Kind, Split
from axonlaunch.data.datasets.shuffle import mix

_MAX_STRIDE = 8


class SyntheticTokens(DatasetWithoutText):
    """Sequences that count up by a stride of 1 to 8 from a random start, modulo the vocabulary."""

    kind: Kind = "tokens"

    def __init__(self, config: SyntheticTokensConfig) -> None:
        self.num_samples = config.num_samples
        self.num_eval_samples = config.num_eval_samples
        self.num_classes = self.vocab_size = config.vocab_size
        self.sample_shape = (config.sequence_length,)
        self._is_packed = config.document_length is not None
        self._document_length = config.document_length or config.sequence_length

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(is_packed=self._is_packed)

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the sequences with these indices, in this order."""
        words = _words(indices, split)
        start = (words >> np.uint64(8)) % np.uint64(self.vocab_size)
        stride = words % np.uint64(_MAX_STRIDE) + np.uint64(1)
        steps = np.arange(self.sample_shape[0] + 1, dtype=np.uint64)
        tokens = (start[:, None] + stride[:, None] * steps) % np.uint64(self.vocab_size)
        tokens = tokens.astype(np.int64)
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # of the estimated size
        if not self._is_packed:
            return Batch.from_numpy(inputs, targets)
        positions = np.arange(inputs.shape[1]) % self._document_length
        return Batch.from_numpy(inputs, targets, np.tile(positions, (len(inputs), 1)))


class SyntheticImages(DatasetWithoutText):
    """A fixed pattern for each class, with noise of the same strength."""

    kind: Kind = "images"

    def __init__(self, config: SyntheticImagesConfig) -> None:
        self.num_samples = config.num_samples
        self.num_eval_samples = config.num_eval_samples
        self.num_classes = config.num_classes
        self.sample_shape = (config.num_channels, config.image_size, config.image_size)
        pixels = int(np.prod(self.sample_shape))
        grid = np.arange(config.num_classes * pixels, dtype=np.uint64)
        self._patterns = _spread(mix(grid)).reshape(config.num_classes, pixels)

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the images with these indices, in this order."""
        words = _words(indices, split)
        classes = (words % np.uint64(self.num_classes)).astype(np.int64)
        pixels = np.arange(self._patterns.shape[1], dtype=np.uint64)
        noise = _spread(mix(words[:, None] + pixels))
        images = self._patterns[classes] + noise
        return Batch.from_numpy(images.reshape(len(words), *self.sample_shape), classes)


def _words(indices: Sequence[int] | npt.NDArray[np.int64], split: Split) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each sample; training and held-out samples differ."""
    numbers = np.asarray(indices, dtype=np.uint64) * np.uint64(2) + np.uint64(split == "eval")
    return mix(numbers)


def _spread(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Map 64-bit words uniformly to [-1, 1)."""
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
