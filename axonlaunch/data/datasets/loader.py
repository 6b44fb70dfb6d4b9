"""Loads each shard's rows of every global batch ahead of the step that needs them.

The samples of a step follow from the seed and the step number. The number of shards only decides
how they are divided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.schema import RunConfig
from axonlaunch.data.datasets.dataset import AnyBatch, Dataset
from axonlaunch.data.datasets.samples import Samples
from axonlaunch.data.datasets.shuffle import dataset_indices, permute
from axonlaunch.data.datasets.user_datasets import StreamedSamples

# Evaluations with different seeds must use the same samples.
_EVAL_KEY = (0,)


class Loader:
    """Batches of one shard: of one rank, or of several ranks that work on the same samples.

    Attributes:
        dataset: Source of the samples.
        global_batch_size: Samples per step over all shards.
        first_row_at: Number of samples of other data that the run saw before the first row of this
            dataset.
    """

    first_row_at = 0

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        global_batch_size: int,
        num_shards: int = 1,
        shard: int = 0,
        micro_batch_size: int | None = None,
        marks_targets: bool = True,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Store the options.

        Args:
            dataset: Source of the samples.
            seed: Seed of the run, which decides the order.
            global_batch_size: Samples per step over all shards.
            num_shards: Number of shards that share each batch.
            shard: Index of this shard.
            micro_batch_size: Number of samples that custom data is collated by. None: the consumer
                of a batch decides.
            marks_targets: Whether the loss ignores targets marked ``IGNORE_INDEX``. A custom loss
                would count them.
            prefetch: Number of batches that ``iterate`` loads ahead.
            pin_memory: Whether to return batches in page-locked memory, for an accelerator.

        Raises:
            ValueError: The batch can't be divided evenly, or there is no such shard.
        """
        _rows_per_shard(global_batch_size, num_shards)
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard={shard}: there are {num_shards}, counted from 0")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self._seed = seed
        self._num_shards = num_shards
        self._shard = shard
        self._micro_batch_size = micro_batch_size
        self._marks_targets = marks_targets
        self._prefetch = prefetch
        self._pin_memory = pin_memory

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the dataset's indices of this shard's rows of a step's global batch."""
        rows = _rows_per_shard(self.global_batch_size, self._num_shards)
        first = step * self.global_batch_size + self._shard * rows - self.first_row_at
        return order_of(self.dataset, np.arange(first, first + rows), seed=self._seed)

    def batch(self, step: int) -> AnyBatch:
        """Return this shard's rows of a step's global batch: a contiguous slice of it."""
        return self._prepare(self.dataset.samples(self.indices(step), split="train"))

    def iterate(self, start_step: int = 0) -> Generator[AnyBatch]:
        """Yield the batches of this step and all later steps, without end, loaded in a thread.

        An exception while loading is raised at the step of the batch. Closing the generator ends
        the thread.
        """
        steps = count(start_step)
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            try:
                loading = deque(pool.submit(self.batch, next(steps)) for _ in range(self._prefetch))
                while True:
                    loading.append(pool.submit(self.batch, next(steps)))
                    yield loading.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def eval_batches(
        self,
        num_batches: int | None = None,
        *,
        batch_size: int | None = None,
        part: range | None = None,
    ) -> Iterator[AnyBatch]:
        """Yield this shard's rows of the held-out samples, each sample once over all shards.

        Every shard gets the same number of batches, all of one shape. Surplus rows at the end do
        not count.

        Args:
            num_batches: Maximum number of global batches, a fixed random choice of samples; None:
                all.
            batch_size: Samples of a batch over all shards; None: ``global_batch_size``.
            part: Indices of the held-out samples to use; None: all.

        Raises:
            ValueError: The batch can't be divided evenly.
        """
        size = batch_size or self.global_batch_size
        part = range(self.dataset.num_eval_samples) if part is None else part
        rows, samples = _rows_per_shard(size, self._num_shards), len(part)
        available = -(-samples // size)
        for number in range(available if num_batches is None else min(num_batches, available)):
            first = number * size + self._shard * rows
            positions = np.arange(first, first + rows)
            surplus = positions >= samples
            positions[surplus] = 0
            indices = part.start + permute(positions, size=samples, key=_EVAL_KEY)
            batch = self.dataset.samples(indices, split="eval")
            counted = rows - int(surplus.sum())
            yield self._prepare(batch.uncounted(counted, marks_targets=self._marks_targets))

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the data position after a number of steps; None: the number is enough."""
        del step
        return None

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the position of another loader of the same data."""
        del state

    def _prepare(self, batch: AnyBatch) -> AnyBatch:
        if self._micro_batch_size is not None:
            batch = batch.ready(self._micro_batch_size)
        return batch.pin_memory() if self._pin_memory else batch


class StreamLoader(Loader):
    """Batches of a dataset that can only be read in order.

    Each shard reads all samples and keeps its rows. The global sample index counts the samples
    read, so it does not depend on the number of shards.
    """

    dataset: StreamedSamples

    def __init__(self, dataset: StreamedSamples, **options: Any) -> None:
        """Start at the first sample."""
        super().__init__(dataset, **options)
        self._samples, self._epoch = 0, 0
        self._reading = self._begin_epoch(0)
        self._states: dict[int, dict[str, Any]] = {}

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the positions in the stream of this shard's rows of a step's global batch."""
        rows = _rows_per_shard(self.global_batch_size, self._num_shards)
        first = step * self.global_batch_size + self._shard * rows
        return np.arange(first, first + rows)

    def batch(self, step: int) -> AnyBatch:
        """Return this shard's rows of a step's global batch. Earlier samples are read and dropped.

        Raises:
            ValueError: The step was already read, or the stream is empty.
        """
        first = step * self.global_batch_size
        if first < self._samples:
            raise ValueError(f"step {step} of a stream that was read up to {self._samples} samples")
        while self._samples < first:
            self._next()
        items = [self._next() for _ in range(self.global_batch_size)]
        if self.dataset.has_state:
            self._states[step + 1] = {
                "samples": self._samples,
                "epoch": self._epoch,
                "dataset": self.dataset.state(),
            }
            # The consumer is far enough ahead that this state is no longer requested.
            self._states.pop(step - self._prefetch, None)
        rows = self.indices(step) - first
        return self._prepare(Samples(items[rows[0] : rows[-1] + 1], self.dataset.collate))

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the position of the stream after the batch of a step was read."""
        return self._states.get(step)

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the position of another loader of the same data."""
        self._samples, self._epoch = int(state["samples"]), int(state["epoch"])
        self._reading = self._begin_epoch(self._epoch)
        self.dataset.load_state(state["dataset"])

    def _next(self) -> Any:
        """Read a sample; restart the stream after its last sample."""
        for _ in range(2):
            for item in self._reading:
                self._samples += 1
                return item
            self._epoch += 1
            self._reading = self._begin_epoch(self._epoch)
        raise ValueError("the dataset is empty: its iterator yields no sample")

    def _begin_epoch(self, epoch: int) -> Iterator[Any]:
        self.dataset.begin(epoch)
        return self.dataset.read()


def order_of(
    dataset: Dataset, positions: npt.NDArray[np.int64], *, seed: int
) -> npt.NDArray[np.int64]:
    """Return the index of the sample at each global sample index.

    Args:
        dataset: A dataset with access by index.
        positions: [n] int64, counted from the first sample of the run, through all epochs.
        seed: Seed of the shuffle.

    Returns:
        [n] int64, each in [0, ``num_samples``).
    """
    if (order := dataset.info.order) is not None:
        return order(positions, seed=seed)
    return dataset_indices(positions, num_samples=dataset.num_samples, seed=seed)


def rank_loader(
    config: RunConfig, dataset: Dataset, *, layout: Layout, rank: int, pin_memory: bool = False
) -> Loader:
    """Return the loader of a rank's share; ranks that work on the same samples get the same share.

    Args:
        config: The run.
        dataset: Dataset of ``config.options.data``.
        layout: Layout of the run.
        rank: The global rank.
        pin_memory: Whether to return batches in page-locked memory, for an accelerator.
    """
    return _loader(
        config,
        dataset,
        num_shards=layout.data_ranks,
        shard=layout.data_shard(rank),
        micro_batch_size=layout.micro_batch_size,
        pin_memory=pin_memory,
    )


def full_loader(config: RunConfig, dataset: Dataset) -> Loader:
    """Return the loader of a run's global batches, undivided."""
    return _loader(config, dataset)


def _loader(config: RunConfig, dataset: Dataset, **options: Any) -> Loader:
    options["seed"] = config.seed
    options["global_batch_size"] = config.train.global_batch_size
    options["marks_targets"] = config.train.loss is None
    if isinstance(dataset, StreamedSamples):
        return StreamLoader(dataset, **options)
    return Loader(dataset, **options)


def _rows_per_shard(batch_size: int, num_shards: int) -> int:
    if batch_size < 1 or batch_size % num_shards:
        raise ValueError(
            f"global_batch_size={batch_size}: must be divisible by {num_shards} shards; "
            f"use a multiple of {num_shards}"
        )
    return batch_size // num_shards
