"""Token datasets with samples that are windows of one long row of tokens.

Shared by byte and token files; reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import Batch, DatasetWithoutText, Kind, Split

Tokens = npt.NDArray[Any]


class TokenWindows(DatasetWithoutText):
    """Adjacent windows; each target is the token after its input.

    A window starts at the end of the previous one, so each token is a target at most once per
    epoch.
    """

    kind: Kind = "tokens"

    def __init__(
        self, train: Tokens, held_out: Tokens, *, sequence_length: int, num_classes: int
    ) -> None:
        """Store two rows of tokens.

        Raises:
            ConfigError: One of them is shorter than a sample.
        """
        self.num_classes = num_classes
        self.sample_shape = (sequence_length,)
        self._rows = {"train": train, "eval": held_out}
        for what, row in (("training", train), ("held-out", held_out)):
            if len(row) < sequence_length + 1:
                longest = min(len(train), len(held_out)) - 1
                message = (
                    f"the {what} part has {len(row)} tokens, and a sample takes "
                    f"{sequence_length + 1} (its targets are one ahead); give more data"
                )
                message += f", or use {longest} or less" if longest > 0 else ""
                raise ConfigError([ConfigIssue("data.sequence_length", message, sequence_length)])

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return self._count("train")

    @property
    def num_eval_samples(self) -> int:
        """Number of held-out samples."""
        return self._count("eval")

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.num_classes

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the windows with these indices, in this order."""
        (length,) = self.sample_shape
        starts = np.asarray(indices, dtype=np.int64)[:, None] * length
        # One gather for inputs and targets; int64, as embeddings and losses require.
        windows = self._rows[split][starts + np.arange(length + 1)].astype(np.int64)
        return Batch.from_numpy(windows[:, :-1].copy(), windows[:, 1:].copy())

    def _count(self, split: Split) -> int:
        return (len(self._rows[split]) - 1) // self.sample_shape[0]
