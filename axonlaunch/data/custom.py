"""A user's own dataset, named by where it is imported from.

It takes what has the form of ``data.dataset.Dataset``, or a map-style dataset of pairs as torch's
``DataLoader`` does, and refuses the rest; what the target itself raises passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from axonlaunch.config.data import CustomDataConfig
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.plugins import import_callable
from axonlaunch.data.dataset import Batch, Dataset, Kind, NoText, Split

_DATASET = ("kind", "num_samples", "num_eval_samples", "num_classes", "sample_shape", "samples")


def build_custom_dataset(config: CustomDataConfig) -> Dataset:
    """Import ``target`` and call it with the arguments.

    Raises:
        ConfigError: It can't be imported, can't be called, or returns no dataset.
    """
    builder = import_callable("data.target", config.target, config.arguments)
    dataset = builder(**config.arguments)
    missing = [name for name in _DATASET if not hasattr(dataset, name)]
    if not missing:
        return cast("Dataset", dataset)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return PairsDataset(dataset, config)
    raise _refused(
        config,
        f"returned {type(dataset).__name__}, which is neither a map-style dataset (__len__ and "
        f"__getitem__) nor one of ours: it has no {', '.join(missing)}",
    )


class PairsDataset(NoText):
    """A map-style dataset whose items are ``(inputs, targets)``; its last samples are held out."""

    def __init__(self, pairs: Any, config: CustomDataConfig) -> None:
        """Look at the first item.

        Raises:
            ConfigError: There is none, it is no such pair, or the number of classes is not known.
        """
        self._pairs = pairs
        if not len(pairs):
            raise _refused(config, "its dataset is empty")
        item = pairs[0]
        if not isinstance(item, tuple | list) or len(item) != 2:
            message = f"its items are {type(item).__name__}; return a pair (inputs, targets)"
            raise _refused(config, message)
        inputs = np.asarray(item[0])
        self.kind: Kind = "tokens" if np.issubdtype(inputs.dtype, np.integer) else "images"
        self.sample_shape = inputs.shape
        self.num_classes = _num_classes(pairs, config)
        self.num_eval_samples = round(len(pairs) * config.eval_fraction)
        self.num_samples = len(pairs) - self.num_eval_samples

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the samples of these indices, in their order."""
        first = self.num_samples if split == "eval" else 0
        pairs = [self._pairs[first + int(index)] for index in indices]
        dtype = np.int64 if self.kind == "tokens" else np.float32
        inputs = np.stack([np.asarray(pair[0], dtype=dtype) for pair in pairs])
        return Batch.from_numpy(inputs, np.stack([np.asarray(pair[1]) for pair in pairs]))


def _num_classes(pairs: Any, config: CustomDataConfig) -> int:
    """Return the size of the target space, as given, or as the dataset says it itself."""
    if config.num_classes is not None:
        return config.num_classes
    for name in ("num_classes", "vocab_size"):
        if isinstance(getattr(pairs, name, None), int):
            return int(getattr(pairs, name))
    if hasattr(pairs, "classes"):  # as torchvision's have
        return len(pairs.classes)
    message = "the dataset has no attribute num_classes or vocab_size; set data.num_classes"
    raise _refused(config, message)


def _refused(config: CustomDataConfig, message: str) -> ConfigError:
    return ConfigError([ConfigIssue("data.target", message, config.target)])
