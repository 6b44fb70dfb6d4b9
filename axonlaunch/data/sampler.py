"""The loader's order of samples for a plain ``torch.utils.data.DataLoader``.

It says which samples a rank takes, and reads none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.process_group import default_group
from axonlaunch.data.shuffle import Indices, dataset_indices


class DistributedSampler(Sampler[int]):
    """A rank's share of an epoch, drawn from the order in which runs of the command train.

    The samples of an epoch, shuffled by seed and epoch alone, are dealt out in global batches: the
    n-th batches of all ranks together are the n-th global batch, whatever the number of ranks.
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
        """Choose a rank's share.

        Args:
            dataset: What the DataLoader reads; its length alone is asked for.
            world: The ranks that share it, a whole world or one group of it; None: the world.
            batch_size: The DataLoader's, samples of a rank's batch. A rank then has the same rows
                of each global batch as the loader gives it, the rank-th slice; with 1 the global
                batches are the same and their rows are dealt to the ranks in turn.
            shuffle: Whether the order is shuffled, differently in each epoch, or the dataset's own.
            seed: Of the shuffle, the same on every rank: a run's ``seed``.
            drop_last: Where the ranks can't share evenly, leave the last samples out; otherwise
                the epoch's first ones are taken again.

        Raises:
            ValueError: The dataset is empty or has fewer samples than ranks under ``drop_last``,
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
            raise ValueError(f"this process is not in {group}: only its members have a share")
        rounded = self._samples if drop_last else self._samples + self._ranks - 1
        self._share = rounded // self._ranks
        if not self._share:
            raise ValueError(
                f"{self._ranks} ranks can't share a dataset of {self._samples} samples; use more "
                "samples" + (", or drop_last=False" if self._samples else "")
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, counted from 0, that the next iteration is of."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._share

    def __iter__(self) -> Iterator[int]:
        # What was padded is the epoch's beginning again.
        places = self._places() % self._samples
        if not self._shuffle:
            return iter(places.tolist())
        positions = self._epoch * self._samples + places
        indices = dataset_indices(positions, num_samples=self._samples, seed=self._seed)
        return iter(indices.tolist())

    def _places(self) -> Indices:
        """Return this rank's places in the epoch, in its order.

        Of 2 ranks with batches of 2, rank 0 has places 0, 1, 4, 5 and rank 1 has 2, 3, 6, 7. The
        last batch is shorter where the batch size does not divide a rank's share.
        """
        own = np.arange(self._share)
        batch, row = np.divmod(own, self._batch_size)
        rows = np.minimum(self._batch_size, self._share - batch * self._batch_size)
        places: Indices = batch * self._batch_size * self._ranks + self._rank * rows + row
        return places
