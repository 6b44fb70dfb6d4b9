"""Handwritten digits: the 1797 images that come with scikit-learn.

Needs the optional extra ``digits``; downloads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import DigitsConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import Batch, DatasetWithoutText, Kind, Split
from axonlaunch.data.datasets.shuffle import permute


class Digits(DatasetWithoutText):
    """Gray images of one digit each, 0 black to 1 white, enlarged to the configured size."""

    kind: Kind = "images"
    num_classes = 10

    def __init__(self, config: DigitsConfig) -> None:
        """Load all images.

        Raises:
            ConfigError: scikit-learn is not installed, or one split has no images.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as reason:
            message = "needs scikit-learn; pip install 'axonlaunch[digits]'"
            raise ConfigError([ConfigIssue("data.name", message, config.name)]) from reason
        images, classes = load_digits(return_X_y=True)
        images = _enlarged(images.reshape(-1, 8, 8).astype(np.float32) / 16, config.image_size)
        # The file is sorted by writer: shuffle it, always the same way, before splitting it.
        order = permute(np.arange(len(images)), size=len(images), key=(0,))
        held_out = round(len(images) * config.eval_fraction)
        if not 0 < held_out < len(images):
            message = f"leaves one split of {len(images)} images empty; use 0.2"
            raise ConfigError([ConfigIssue("data.eval_fraction", message, config.eval_fraction)])
        self.sample_shape = (1, config.image_size, config.image_size)
        self._images = images[order].reshape(-1, *self.sample_shape)
        self._classes = classes[order].astype(np.int64)
        self.num_eval_samples = held_out
        self.num_samples = len(images) - held_out

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the images with these indices, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        chosen = chosen + (self.num_samples if split == "eval" else 0)
        return Batch.from_numpy(self._images[chosen], self._classes[chosen])


def _enlarged(images: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Interpolate square images linearly in both dimensions, with pixel centers aligned."""
    old = images.shape[-1]
    if size == old:
        return images
    centers = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
    left = np.minimum(centers.astype(np.int64), old - 2)
    weights = np.zeros((size, old), dtype=np.float32)
    weights[np.arange(size), left] = 1 - (centers - left)
    weights[np.arange(size), left + 1] = centers - left
    return (weights @ images @ weights.T).astype(np.float32)
