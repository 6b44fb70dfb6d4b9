import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from axonlaunch.config.options.data import SyntheticImagesConfig, SyntheticTokensConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.datasets.dataset import IGNORE_INDEX, Batch, DatasetWithoutText
from axonlaunch.data.datasets.loader import Loader, StreamLoader
from axonlaunch.data.datasets.user_datasets.adapters import adapt_dataset


class Numbers(DatasetWithoutText):
    """Samples that are their index; those for evaluation are negative."""

    kind = "tokens"
    sample_shape = (1,)

    def __init__(self, num_samples=100, num_eval_samples=23):
        self.num_samples, self.num_eval_samples = num_samples, num_eval_samples
        self.num_classes = num_samples

    def samples(self, indices, *, split):
        indices = np.asarray(indices, dtype=np.int64)[:, None]
        return Batch.from_numpy(indices, indices.copy())


def loader(dataset, *, num_shards=1, shard=0, size=12, **options):
    return Loader(
        dataset, seed=3, global_batch_size=size, num_shards=num_shards, shard=shard, **options
    )


@pytest.mark.parametrize("num_shards", [2, 3, 4, 12])
@pytest.mark.parametrize("step", [0, 7, 8, 1000])
def test_shards_put_together_are_the_batch_of_one(num_shards, step):
    dataset = Numbers()
    full = loader(dataset).batch(step).inputs
    shards = [
        loader(dataset, num_shards=num_shards, shard=shard).batch(step).inputs
        for shard in range(num_shards)
    ]
    assert torch.equal(torch.cat(shards), full)


def test_an_epoch_over_steps_and_shards_has_every_sample_once():
    dataset = Numbers(num_samples=60)
    samples = [
        int(row)
        for step in range(5)
        for shard in range(3)
        for row in loader(dataset, num_shards=3, shard=shard).batch(step).inputs[:, 0]
    ]
    assert sorted(samples) == list(range(60))


def test_prefetched_batches_equal_single_batches_from_any_step():
    ahead = loader(Numbers())
    with closing(ahead.iterate(5)) as batches:
        for step in range(5, 15):
            assert torch.equal(next(batches).inputs, ahead.batch(step).inputs)


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_batches_are_loaded_while_the_step_runs():
    loaded = []

    class Watched(Numbers):
        def samples(self, indices, *, split):
            loaded.append(threading.current_thread())
            return super().samples(indices, split=split)

    with closing(loader(Watched()).iterate()) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        while len(loaded) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(loaded) == 3
        assert threading.current_thread() not in loaded
    assert not loader_threads()


def test_an_error_of_loading_is_raised_at_its_step_and_leaves_no_thread():
    class Broken(Numbers):
        calls = 0

        def samples(self, indices, *, split):
            self.calls += 1
            if self.calls > 2:
                raise OSError("the disk is gone")
            return super().samples(indices, split=split)

    batches = loader(Broken()).iterate()
    next(batches)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not loader_threads()


def test_a_loop_that_breaks_off_leaves_no_thread():
    def train():
        with closing(loader(Numbers()).iterate()) as batches:
            for _ in batches:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert not loader_threads()


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("held_out", [1, 7, 8, 9, 23, 24])
def test_every_held_out_sample_counts_once_in_batches_of_one_shape(num_shards, held_out):
    dataset = Numbers(num_eval_samples=held_out)
    shards = [
        list(loader(dataset, num_shards=num_shards, shard=shard, size=8).eval_batches())
        for shard in range(num_shards)
    ]
    assert {len(batches) for batches in shards} == {-(-held_out // 8)}
    counted = []
    for batch in (batch for batches in shards for batch in batches):
        assert batch.inputs.shape == batch.targets.shape == (8 // num_shards, 1)
        assert (batch.inputs >= 0).all()
        counted += batch.targets[batch.targets != IGNORE_INDEX].tolist()
    assert sorted(counted) == list(range(held_out))


def test_a_capped_evaluation_is_of_the_same_samples_in_every_layout():
    dataset = Numbers(num_eval_samples=1000)

    def samples(num_shards, seed=3):
        targets = set()
        for shard in range(num_shards):
            shard_loader = Loader(
                dataset, seed=seed, global_batch_size=8, num_shards=num_shards, shard=shard
            )
            for batch in shard_loader.eval_batches(5):
                targets |= set(batch.targets.flatten().tolist())
        return targets

    assert samples(1) == samples(4) == samples(2, seed=9)
    assert len(samples(1)) == 40
    assert max(samples(1)) > 500  # distributed over the held-out part, not only its beginning


def test_an_evaluation_may_have_a_batch_size_of_its_own():
    batches = list(loader(Numbers(num_eval_samples=40), num_shards=2).eval_batches(batch_size=20))
    assert [len(batch.inputs) for batch in batches] == [10, 10]


def test_a_batch_larger_than_the_data_goes_into_the_next_epoch():
    batch = loader(Numbers(num_samples=5), size=12).batch(0).inputs[:, 0].tolist()
    assert sorted(batch[:5]) == sorted(batch[5:10]) == [0, 1, 2, 3, 4]


def test_uncounted_rows_keep_inputs_that_a_model_can_take():
    dataset = build_dataset(SyntheticTokensConfig(num_eval_samples=3, sequence_length=4))
    (batch,) = loader(dataset).eval_batches()
    assert (batch.inputs >= 0).all()
    assert (batch.targets[3:] == IGNORE_INDEX).all()
    images = build_dataset(SyntheticImagesConfig(num_eval_samples=3))
    (batch,) = loader(images).eval_batches()
    assert (batch.targets != IGNORE_INDEX).sum() == 3


def test_indivisible_batch_is_refused_by_loader():
    with pytest.raises(ValueError, match="global_batch_size=12: must be divisible by 5 shards"):
        loader(Numbers(), num_shards=5)
    with pytest.raises(ValueError, match="shard=2: there are 2, counted from 0"):
        loader(Numbers(), num_shards=2, shard=2)
    with pytest.raises(ValueError, match="global_batch_size=7: must be divisible by 2 shards"):
        list(loader(Numbers(), num_shards=2).eval_batches(batch_size=7))


def test_for_a_device_every_batch_is_in_page_locked_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: pinned.append(batch) or batch)
    batches = loader(Numbers(), pin_memory=True)
    assert batches.batch(0) is pinned[0]
    assert list(batches.eval_batches()) == pinned[1:]
    loader(Numbers()).batch(0)
    assert len(pinned) == 3


class Counted:
    """A stream of numbers whose state is the last one."""

    at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def counted_stream():
    return adapt_dataset(
        Counted(),
        collate=list,
        eval_fraction=None,
        num_classes=None,
        refusal=ValueError,
        description="counted",
    )


def test_stream_after_other_data_begins_with_its_first_sample():
    for shard in range(2):
        dataset = counted_stream()
        loading = StreamLoader(dataset, seed=0, global_batch_size=4, num_shards=2, shard=shard)
        loading.first_row_at = 8
        assert [loading.batch(2).items, loading.batch(3).items] == [
            [1 + 2 * shard, 2 + 2 * shard],
            [5 + 2 * shard, 6 + 2 * shard],
        ]


@pytest.mark.parametrize("prefetch", [0, 2, 5])
def test_stream_keeps_states_of_recent_steps_only(prefetch):
    dataset = counted_stream()
    loading = StreamLoader(dataset, seed=0, global_batch_size=4, prefetch=prefetch)
    with closing(loading.iterate()) as batches:
        for step, _ in zip(range(1, 30), batches, strict=False):
            if step > 20:
                assert loading.state(step)["dataset"] == f'{{"at": {4 * step}}}'
            elif step == 20:
                assert not any(loading.state(earlier) for earlier in range(20 - prefetch))
