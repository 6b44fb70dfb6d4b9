"""Loads each shard's rows of every global batch ahead of the step that needs them.

The samples of a step follow from the seed and the step number. The number of shards only decides
how they are divided.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.schema import RunConfig
from axonlaunch.data.datasets.dataset import AnyBatch, Batch, Dataset, Split
from axonlaunch.data.datasets.samples import (
    CollatedSamples,
    SampleOrigin,
    Samples,
    default_collate,
)
from axonlaunch.data.datasets.shuffle import dataset_indices, permute
from axonlaunch.data.datasets.user_datasets.adapters import StreamedSamples, UserDataset
from axonlaunch.data.reading.ahead import load_ahead
from axonlaunch.data.reading.random_numbers import kept_generators

# Evaluations with different seeds must use the same samples.
_EVAL_KEY = (0,)
_HANG = 0.8
"""Fraction of ``launch.timeout_s`` after which a worker hangs. The supervisor waits longer."""


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a batch, which a worker process reads.

    Attributes:
        indices: Indices of the samples, [n].
        epochs: Number of each sample's pass over the data, [n].
        split: Whether they are training or held-out samples.
        counted: Number of rows, from the first, that count in the loss.
    """

    indices: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    split: Split
    counted: int

    def pieces(self, size: int) -> Iterator[_Rows]:
        """Divide the rows into pieces of ``size`` rows."""
        for start in range(0, len(self.indices), size):
            rows = slice(start, start + size)
            counted = min(max(0, self.counted - start), size)
            yield _Rows(self.indices[rows], self.epochs[rows], self.split, counted)


@dataclass(frozen=True)
class _Piece:
    """A part of a batch, as sent from a worker process.

    Attributes:
        content: Tensors of a ``Batch``, or the collated micro-batches.
        parts: (number of samples, whether the loss counts them) of each collated micro-batch; None
            if ``content`` is a ``Batch``.
        state: Position of the stream after the batch.
    """

    content: Sequence[Any]
    parts: tuple[tuple[int, bool], ...] | None
    state: dict[str, Any] | None = None

    @classmethod
    def of(cls, batch: AnyBatch, state: dict[str, Any] | None = None) -> _Piece:
        """Return the piece of a batch with collated micro-batches."""
        if isinstance(batch, Batch):
            content = (batch.inputs, batch.targets, batch.positions, batch.surplus, batch.present)
            return cls(content, None, state)
        parts = tuple((part.num_samples, part.is_counted) for part in batch.parts)
        return cls([part.full for part in batch.parts], parts, state)

    def batch(self) -> AnyBatch:
        """Return the batch; samples are not sent back, only what they were collated to."""
        if self.parts is None:
            return Batch(*self.content)
        collated = tuple(
            CollatedSamples(full, *facts)
            for full, facts in zip(self.content, self.parts, strict=True)
        )
        return Samples((None,) * sum(n for n, _ in self.parts), default_collate, parts=collated)


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
        num_workers: int = 0,
        timeout_s: float = 600.0,
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
            num_workers: Number of processes that read a user's dataset ahead; 0: this process.
            timeout_s: Seconds without progress after which a rank counts as hanging. Worker
                processes hang a little earlier.

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
        self._num_workers = num_workers
        self._timeout_s = timeout_s

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the dataset's indices of this shard's rows of a step's global batch."""
        return order_of(self.dataset, self._positions(step), seed=self._seed)

    def batch(self, step: int) -> AnyBatch:
        """Return this shard's rows of a step's global batch: a contiguous slice of it."""
        return self._prepare(self._read(self._rows(step)))

    def read(self, indices: npt.NDArray[np.int64], *, split: Split) -> AnyBatch:
        """Return samples of the first epoch, with the random numbers that a run gives them."""
        return self._read(_Rows(indices, np.zeros_like(indices), split, len(indices)))

    def iterate(self, start_step: int = 0) -> Generator[AnyBatch]:
        """Yield the batches of this step and all later steps, without end.

        They are loaded ahead, in a thread or by ``data.workers``. A user's dataset without workers
        is read in the calling thread, when the batch is needed: its random numbers come from the
        generators that the step uses too.

        An exception while loading is raised at the step of the batch. Closing the generator ends
        the thread and the processes.
        """
        steps = count(start_step)
        if self._num_workers:
            tasks = chain.from_iterable(map(self._tasks, steps))
            yield from self._from_workers(
                tasks, repeat(self._pieces_per_batch), count=self._num_readers
            )
        elif isinstance(self.dataset, UserDataset):
            yield from map(self.batch, steps)
        else:
            loads = (partial(self.batch, step) for step in steps)
            yield from load_ahead(loads, ahead=self._prefetch)

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
        batches = [*self._eval_rows(num_batches, batch_size or self.global_batch_size, part)]
        if not self._num_workers:
            for rows in batches:
                batch = self._read(rows)
                marks = self._marks_targets
                yield self._prepare(batch.uncounted(rows.counted, marks_targets=marks))
            return
        tasks = [[*rows.pieces(self._piece_size)] for rows in batches]
        read = self._from_workers(
            chain.from_iterable(tasks),
            map(len, tasks),
            count=min(self._num_workers, sum(map(len, tasks))),
        )
        for rows, batch in zip(batches, read, strict=True):
            if isinstance(batch, Batch):
                batch = batch.uncounted(rows.counted, marks_targets=self._marks_targets)
            yield batch

    def _eval_rows(self, num_batches: int | None, size: int, part: range | None) -> Iterator[_Rows]:
        """Yield this shard's rows of each batch of an evaluation."""
        part = range(self.dataset.num_eval_samples) if part is None else part
        rows, samples = _rows_per_shard(size, self._num_shards), len(part)
        available = -(-samples // size)
        for number in range(available if num_batches is None else min(num_batches, available)):
            first = number * size + self._shard * rows
            positions = np.arange(first, first + rows)
            surplus = positions >= samples
            positions[surplus] = 0
            indices = part.start + permute(positions, size=samples, key=_EVAL_KEY)
            yield _Rows(indices, np.zeros_like(indices), "eval", rows - int(surplus.sum()))

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the data position after a number of steps; None: the number is enough."""
        del step
        return None

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the position of another loader of the same data."""
        del state

    @property
    def _rows_per_batch(self) -> int:
        return _rows_per_shard(self.global_batch_size, self._num_shards)

    @property
    def _piece_size(self) -> int:
        """Rows that a worker reads at a time: a micro-batch, which is collated as a whole."""
        return self._micro_batch_size or self._rows_per_batch

    @property
    def _num_readers(self) -> int:
        """Number of processes that read training samples."""
        return self._num_workers

    @property
    def _pieces_per_batch(self) -> int:
        return -(-self._rows_per_batch // self._piece_size)

    def _positions(self, step: int) -> npt.NDArray[np.int64]:
        rows = self._rows_per_batch
        first = step * self.global_batch_size + self._shard * rows - self.first_row_at
        return np.arange(first, first + rows)

    def _rows(self, step: int) -> _Rows:
        indices = self.indices(step)
        epochs = self._positions(step) // max(1, self.dataset.num_samples)
        return _Rows(indices, epochs, "train", len(indices))

    def _read(self, rows: _Rows) -> AnyBatch:
        if not isinstance(self.dataset, UserDataset):
            return self.dataset.samples(rows.indices, split=rows.split)
        # Evaluations of runs with different seeds have the same random numbers.
        seed = self._seed if rows.split == "train" else 0
        return self.dataset.read(rows.indices, split=rows.split, seed=seed, epochs=rows.epochs)

    def _tasks(self, step: int) -> Iterable[Any]:
        """Return the tasks of workers for the batch of a step."""
        return self._rows(step).pieces(self._piece_size)

    def _piece(self, task: Any) -> _Piece:
        """Read a piece of a batch, in a worker process."""
        assert isinstance(task, _Rows)
        batch = self._read(task)
        if isinstance(batch, Samples) and task.counted < len(batch):
            batch = batch.uncounted(task.counted, marks_targets=self._marks_targets)
        return _Piece.of(batch.ready(self._piece_size))

    def _from_workers(
        self, tasks: Iterable[Any], lengths: Iterable[int], *, count: int
    ) -> Generator[AnyBatch]:
        """Yield batches that worker processes read ahead.

        Args:
            tasks: The tasks for all batches.
            lengths: Number of tasks of each batch.
            count: Number of processes.
        """
        from axonlaunch.data.reading.processes import WorkerProcesses  # imports torch

        dataset = self.dataset
        assert isinstance(dataset, UserDataset)
        workers: WorkerProcesses[Any, _Piece] = WorkerProcesses(
            self._piece,
            tasks,
            count=count,
            description=dataset.description,
            timeout_s=_HANG * self._timeout_s,
        )

        def load(length: int) -> AnyBatch:
            pieces = [workers.next() for _ in range(length)]
            self._receive(pieces)
            parts: list[Any] = [piece.batch() for piece in pieces]
            batch: AnyBatch = type(parts[0]).join(parts)
            return batch.pin_memory() if self._pin_memory else batch

        loads = (partial(load, length) for length in lengths)
        yield from load_ahead(loads, ahead=self._prefetch, workers=workers)

    def _receive(self, pieces: list[_Piece]) -> None:
        """Note the state of a stream after a batch."""

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
        self._samples, self._epoch, self._position = 0, 0, 0
        self._reading = self._begin_pass()
        self._states: dict[int, dict[str, Any]] = {}

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the positions in the stream of this shard's rows of a step's global batch."""
        return self._positions(step)

    def batch(self, step: int) -> AnyBatch:
        """Return this shard's rows of a step's global batch. Earlier samples are read and dropped.

        Raises:
            ValueError: The step was already read, or the stream is empty.
        """
        batch = self._prepare(self._read_step(step))
        self._keep_state(step, self._state())
        return batch

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the position of the stream after the batch of a step was read."""
        return self._states.get(step)

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the position of another loader of the same data."""
        self._samples, self._epoch = int(state["samples"]), int(state["epoch"])
        self._position = int(state["position"])
        self._reading = self._begin_pass()
        self.dataset.load_state(state["dataset"])

    @property
    def _num_readers(self) -> int:
        return 1  # a stream is read in its order

    @property
    def _pieces_per_batch(self) -> int:
        return 1

    def _tasks(self, step: int) -> Iterable[Any]:
        return [step]

    def _piece(self, task: Any) -> _Piece:
        if not isinstance(task, int):
            return super()._piece(task)
        batch = self._read_step(task).ready(self._piece_size)
        return _Piece.of(batch, {"step": task, "state": self._state()})

    def _receive(self, pieces: list[_Piece]) -> None:
        for piece in pieces:
            if piece.state is not None:
                self._keep_state(piece.state["step"], piece.state["state"])

    def _read_step(self, step: int) -> Samples:
        first = step * self.global_batch_size - self.first_row_at
        if first < self._samples:
            raise ValueError(f"step {step} of a stream that was read up to {self._samples} samples")
        with kept_generators():
            while self._samples < first:
                self._next()
            read = [self._next() for _ in range(self.global_batch_size)]
        rows = self.indices(step) - first
        items, origins = zip(*read[rows[0] : rows[-1] + 1], strict=True)
        return Samples([*items], self.dataset.collate, origins=origins)

    def _state(self) -> dict[str, Any] | None:
        if not self.dataset.has_state:
            return None
        return {
            "samples": self._samples,
            "epoch": self._epoch,
            "position": self._position,
            "dataset": self.dataset.state(),
        }

    def _keep_state(self, step: int, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._states[step + 1] = state
            # The consumer is far enough ahead that this state is no longer requested.
            self._states.pop(step - self._prefetch, None)

    def _next(self) -> tuple[Any, SampleOrigin]:
        """Read a sample; restart the stream after its last sample."""
        for _ in range(2):
            for item in self._reading:
                self._samples += 1
                self._position += 1
                return item
            self._epoch, self._position = self._epoch + 1, 0
            self._reading = self._begin_pass()
        raise ValueError("the dataset is empty: its iterator yields no sample")

    def _begin_pass(self) -> Iterator[tuple[Any, SampleOrigin]]:
        self.dataset.begin(self._epoch, seed=self._seed)
        return self.dataset.passes(seed=self._seed, epoch=self._epoch, position=self._position)


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
    config: RunConfig,
    dataset: Dataset,
    *,
    layout: Layout,
    rank: int,
    pin_memory: bool = False,
    num_workers: int = 0,
) -> Loader:
    """Return the loader of a rank's share; ranks that work on the same samples get the same share.

    Args:
        dataset: Dataset of ``config.options.data``.
        layout: Layout of the run.
        rank: The global rank.
        pin_memory: Whether to return batches in page-locked memory, for an accelerator.
        num_workers: Number of processes that read a user's dataset ahead; 0: this process.
    """
    return _loader(
        config,
        dataset,
        num_shards=layout.data_ranks,
        shard=layout.data_shard(rank),
        micro_batch_size=layout.micro_batch_size,
        pin_memory=pin_memory,
        num_workers=num_workers,
    )


def full_loader(config: RunConfig, dataset: Dataset) -> Loader:
    """Return the loader of a run's global batches, undivided."""
    return _loader(config, dataset)


def _loader(config: RunConfig, dataset: Dataset, **options: Any) -> Loader:
    options["seed"] = config.seed
    options["global_batch_size"] = config.train.global_batch_size
    options["marks_targets"] = config.train.loss is None
    options["timeout_s"] = config.launch.timeout_s
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
