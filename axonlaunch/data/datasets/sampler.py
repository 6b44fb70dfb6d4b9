"""Provides the loader's order of samples to a plain ``torch.utils.data.DataLoader``.

It only selects indices and reads no samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.process_group import default_group
from axonlaunch.data.datasets.shuffle import Indices, dataset_indices


class DistributedSampler(Sampler[int]):
    """A rank's share of an epoch, in the order in which runs of the command train.

    The samples of an epoch, shuffled by the seed and the epoch only, are divided into global
    batches: the n-th batches of all ranks together are the n-th global batch, for any number of
    ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        world: World | ProcessGroup | None = None,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Compute a rank's share.

        Args:
            dataset: Dataset of the DataLoader; only its length is used.
            world: The ranks that share it, a whole world or one of its groups; None: the world.
            batch_size: Samples of a rank's batch, as in the DataLoader. A rank then has the same
                rows of each global batch as with the loader, the rank-th slice. With 1 the global
                batches are the same, but their rows are assigned to the ranks in turn.
            shuffle: Whether to shuffle, differently in each epoch, instead of keeping the dataset's
                order.
            seed: Seed of the shuffle, the same on every rank: a run's ``seed``.
            drop_last: Whether to leave out the last samples if the ranks can't share evenly.
                Otherwise the first samples of the epoch are repeated.

        Raises:
            ValueError: The dataset is empty, or has fewer samples than ranks under ``drop_last``,
                or the batch size is not positive.
        """
        group = world or default_group()
        self._ranks = group.world_size if isinstance(group, World) else group.size
        self._rank = group.rank
        self._samples = len(dataset)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: use 1 or more samples")
        if self._rank < 0:
            raise ValueError(f"this process is not in {group}; only its members have a share")
        rounded = self._samples if drop_last else self._samples + self._ranks - 1
        self._share = rounded // self._ranks
        if not self._share:
            raise ValueError(
                f"{self._ranks} ranks can't share a dataset of {self._samples} samples; use more "
                "samples" + (", or drop_last=False" if self._samples else "")
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._share

    def __iter__(self) -> Iterator[int]:
        # The padding repeats the beginning of the epoch.
        in_epoch = self._positions() % self._samples
        if not self._shuffle:
            return iter(in_epoch.tolist())
        positions = self._epoch * self._samples + in_epoch
        indices = dataset_indices(positions, num_samples=self._samples, seed=self._seed)
        return iter(indices.tolist())

    def _positions(self) -> Indices:
        """Return this rank's positions in the epoch, in its order.

        With 2 ranks and batches of 2, rank 0 has positions 0, 1, 4, 5 and rank 1 has 2, 3, 6, 7.
        The last batch is shorter if the batch size does not divide a rank's share.
        """
        batch, row = np.divmod(np.arange(self._share), self._batch_size)
        rows = np.minimum(self._batch_size, self._share - batch * self._batch_size)
        positions: Indices = batch * self._batch_size * self._ranks + self._rank * rows + row
        return positions
