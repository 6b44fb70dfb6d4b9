"""``data.workers`` and the random numbers of samples: equal to reading in the rank's process."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axonlaunch.data.datasets.dataset import AnyBatch, Batch, DatasetWithoutText
from axonlaunch.data.datasets.loader import Loader, StreamLoader
from axonlaunch.data.datasets.user_datasets.adapters import UserDataset, adapt_dataset
from axonlaunch.data.reading.random_numbers import generator_states, have_moved
from axonlaunch.data.reading.sample_error import SampleError


def augment(index: int) -> Tensor:
    """Return an image that depends on all three global generators."""
    image = torch.full((1, 4, 4), float(index)) + torch.randn(1, 4, 4)
    if random.random() < 0.5:
        image = image.flip(-1)
    return image * float(np.random.uniform(0.5, 1.5))


class Images:
    """Pairs with augmentation."""

    num_classes = 4

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return augment(index), index % 4


class Ragged(Images):
    """Samples of different lengths, for a collate function."""

    def __getitem__(self, index: int) -> Any:
        length = random.randint(1, 9)
        return {"values": torch.rand(length) + index, "index": index}


def masked(items: list[Any]) -> Any:
    """Pad and mask at random."""
    values = torch.nn.utils.rnn.pad_sequence([item["values"] for item in items], batch_first=True)
    mask = torch.rand(values.shape) < 0.3
    return {"values": values.masked_fill(mask, 0), "index": [item["index"] for item in items]}


class Batched(DatasetWithoutText):
    """The interface ``Dataset``, which returns whole batches."""

    kind, num_classes, sample_shape = "images", 4, (1, 4, 4)
    num_samples, num_eval_samples = 40, 6

    def samples(self, indices: Any, *, split: str) -> Batch:
        inputs = torch.stack([augment(int(index)) for index in indices])
        return Batch(inputs, torch.as_tensor(indices) % 4)


class Stream:
    """A stream with a state."""

    def __init__(self) -> None:
        self.at = 0
        self.held_out = [{"values": torch.arange(3.0), "index": at} for at in range(3)]

    def __iter__(self) -> Iterator[Any]:
        while self.at < 21:
            self.at += 1
            yield {"values": torch.rand(random.randint(1, 9)), "index": self.at}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def adapted(dataset: Any, collate: Any = None) -> UserDataset:
    return adapt_dataset(
        dataset,
        collate=collate,
        eval_fraction=0.2,
        num_classes=None,
        refusal=ValueError,
        description="data=custom (mine:Images)",
    )


def loader(dataset: Any, collate: Any = None, **options: Any) -> Loader:
    user = adapted(dataset, collate)
    kind = StreamLoader if isinstance(dataset, Stream) else Loader
    settings = {"seed": 3, "global_batch_size": 8, "micro_batch_size": 2, "timeout_s": 60.0}
    return kind(user, **{**settings, **options})  # type: ignore[arg-type]


def values(batch: AnyBatch) -> list[Any]:
    """Return all tensors and numbers that a step gets from a batch."""
    found = [part.full for part in batch.micro_batches(2)]
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(found)]


def read(loading: Loader, steps: int, start: int = 0) -> list[Any]:
    with closing(loading.iterate(start)) as batches:
        return [values(batch) for batch in islice(batches, steps)]


DATASETS = [(Images, None), (Ragged, masked), (Batched, None), (Stream, masked)]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Wait for the threads that torch tells of killed processes after some seconds."""
    yield
    deadline = time.monotonic() + 20
    while active_children() or any(t.name.startswith("loader") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_process_reads_a_stream_and_a_note_says_why() -> None:
    reading = loader(Stream(), masked, num_workers=3)
    assert isinstance(reading.dataset, UserDataset)
    reading.dataset.num_workers = 3
    with closing(reading.iterate()) as batches:
        next(batches)
        assert len(active_children()) == 1
    assert reading.dataset.info.notes[-1] == (
        "data.workers=3: a stream has one order, so one process per rank reads it; a dataset with "
        "__getitem__ and __len__ is read by 3"
    )


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("dataset", "collate"), DATASETS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_return_the_batches_of_one_process_to_the_bit(
    dataset: Any, collate: Any, num_workers: int
) -> None:
    alone = loader(dataset(), collate)
    expected = read(alone, 7)
    ahead = loader(dataset(), collate, num_workers=num_workers)
    assert read(ahead, 7) == expected
    assert ahead.state(7) == alone.state(7)
    assert read(loader(dataset(), collate, num_workers=num_workers), 3, start=4) == expected[4:]
    held_out = [[values(batch) for batch in each.eval_batches()] for each in (alone, ahead)]
    assert held_out[0] == held_out[1]
    assert held_out[0]


@pytest.mark.parametrize(("dataset", "collate"), DATASETS)
def test_random_numbers_of_samples_are_equal_on_every_layout_and_differ_in_each_epoch(
    dataset: Any, collate: Any
) -> None:
    full = read(loader(dataset(), collate), 9)
    shards = [read(loader(dataset(), collate, num_shards=4, shard=shard), 9) for shard in range(4)]
    for step, batch in enumerate(full):
        by_rank = [leaf for shard in shards for leaf in shard[step]]
        assert sorted(map(str, by_rank)) == sorted(map(str, batch))
    assert read(loader(dataset(), collate, seed=4), 1) != full[:1]
    read_twice = {}
    if dataset is Images:
        for step in range(10):
            batch = loader(Images(), micro_batch_size=8).batch(step)
            assert isinstance(batch, Batch)
            for index, image in zip(
                loader(Images()).indices(step).tolist(), batch.inputs, strict=True
            ):
                read_twice.setdefault(index, []).append(str(image.tolist()))
        assert all(len(set(images)) == len(images) for images in read_twice.values())
        assert max(map(len, read_twice.values())) > 1


@pytest.mark.parametrize(("dataset", "collate"), DATASETS)
def test_reading_leaves_the_global_generators_as_they_were(dataset: Any, collate: Any) -> None:
    loading = loader(dataset(), collate)
    states = generator_states()
    read(loading, 2)
    [*loading.eval_batches()]
    assert not have_moved(states)
    random.random()
    assert have_moved(states)


def test_a_dataset_without_random_numbers_is_read_in_whole_batches() -> None:
    class Counted(Batched):
        calls: list[int] = []

        def samples(self, indices: Any, *, split: str) -> Batch:
            self.calls.append(len(indices))
            return Batch(torch.zeros(len(indices), 1, 4, 4), torch.as_tensor(indices) % 4)

    read(loader(Counted()), 2)
    assert Counted.calls == [8, 8]


class Broken(Images):
    """Does something wrong in a worker, at one sample."""

    def __init__(self, wrong: Any, at: int = 17) -> None:
        super().__init__()
        self.wrong, self.at = wrong, at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.wrong()
        return super().__getitem__(index)


def fail() -> None:
    raise KeyError("no such label")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_names_the_dataset_and_the_sample_and_has_the_traceback(
    num_workers: int,
) -> None:
    with pytest.raises(SampleError) as caught:
        read(loader(Broken(fail), num_workers=num_workers), 5)
    message = r"data=custom (mine:Images): reading sample 17 failed with KeyError: 'no such label'"
    assert str(caught.value).startswith(message)
    assert "test_data_workers.py" in str(caught.value)
    import traceback

    text = "".join(traceback.format_exception(caught.value))
    assert 'raise KeyError("no such label")' in text


def test_a_killed_worker_is_reported_with_its_sample() -> None:
    loading = loader(Broken(lambda: os.kill(os.getpid(), signal.SIGKILL)), num_workers=2)
    with pytest.raises(SampleError, match=r"that read sample 17 was ended by SIGKILL; .*memory"):
        read(loading, 5)


@pytest.mark.slow
def test_a_hanging_worker_is_reported_with_its_sample_and_its_stack() -> None:
    began = time.monotonic()
    loading = loader(Broken(lambda: time.sleep(100)), num_workers=2, timeout_s=1.5)
    with pytest.raises(SampleError, match=r"reading sample 17 has taken .* hangs") as caught:
        read(loading, 5)
    assert "test_data_workers.py" in str(caught.value.__cause__)
    assert time.monotonic() - began < 20


def test_a_slow_batch_of_fast_samples_is_not_reported_as_a_hanging_sample() -> None:
    class Slow(Images):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.2)
            return super().__getitem__(index)

    loading = loader(Slow(), num_workers=1, timeout_s=1.2)
    with pytest.raises(SampleError, match=r"no batch came within 0\.96 s; now sample \d+ is read"):
        read(loading, 1)


def test_a_batch_that_can_not_be_pickled_is_an_error() -> None:
    loading = loader(Ragged(), lambda items: {"function": lambda: items}, num_workers=1)
    with pytest.raises(SampleError, match="passing a batch to the rank's process failed with"):
        read(loading, 1)


@pytest.mark.slow
def test_closing_ends_workers_that_are_busy(tmp_path: Path) -> None:
    loading = loader(
        Broken(lambda: time.sleep(100), at=int(Loader.indices(loader(Images()), 1)[0])),
        num_workers=2,
    )
    began = time.monotonic()
    with closing(loading.iterate()) as batches:
        next(batches)
    assert time.monotonic() - began < 15


def test_an_evaluation_with_fewer_micro_batches_than_workers_starts_fewer_processes() -> None:
    loading = loader(Images(10), num_workers=4)
    started = [len(active_children()) for _ in loading.eval_batches(batch_size=2)]
    assert started == [1]
