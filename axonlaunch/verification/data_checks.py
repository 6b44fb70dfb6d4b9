"""What both sides of a comparison read alike, held against what the data says it is.

A layout and one process that read wrong samples agree. What a dataset of somebody's own means by
its targets is not known here.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axonlaunch.config.data import IGNORE_INDEX, CustomDataConfig, FreeDataConfig
from axonlaunch.data.dataset import AnyBatch, Batch, Dataset, Split
from axonlaunch.data.loader import Loader, StreamLoader, order_of
from axonlaunch.data.mix import AnyText, TextMix
from axonlaunch.data.sharded_rows import ShardedRows
from axonlaunch.data.user_datasets import PairsDataset
from axonlaunch.verification.inputs import evaluated_samples

_COMPARED = 1024
"""Samples of training that held-out ones are looked for among."""
_DISTINCT = 0.9
"""Share of these that must differ: among those that repeat anyway one is found by chance."""
_AT_ONCE = 16
"""Samples of these in memory at a time."""
_STEPS = 16
"""Steps at each end of an epoch whose samples are looked at as a loader gives them: 0.1 ms each."""
_PLACES = 2**14
"""Samples of an epoch that are looked at together: 2 ms."""
_SHARDS_BYTES = 2**26
"""Bytes of files that are tokenised to look at the order of their shards."""
_PASSES = 3
"""Passes over shards that are compared; in the first one shards are in the order of the files."""
_FEW = 16
"""Samples that two epochs may have in the same order by chance, and that are read twice."""


def data_problem(config: Any, loader: Loader, batch: AnyBatch, *, step: int) -> str:
    """Say what both sides would be wrong about alike; empty if the data is what it says.

    Args:
        config: Of the data.
        loader: Of global batches.
        batch: A step's.
        step: Steps done before this one.
    """
    size, samples = loader.global_batch_size, loader.dataset.num_samples
    indices = loader.indices(step)
    here = set(indices.tolist())
    if samples >= (step + 1) * size:
        if len(here) < size:
            return f"the data: step {step + 1} reads a sample twice, with {samples} to read"
        if step and here & set(loader.indices(step - 1).tolist()):
            return f"the data: step {step + 1} reads samples of the step before"
    if not _is_ours(config) or not isinstance(batch, Batch) or loader.dataset.kind != "tokens":
        return ""
    if isinstance(loader.dataset, AnyText):
        return _row_problem(loader.dataset, indices, batch)
    if _follow(batch):
        return ""
    return "the data: targets are not the tokens that follow their inputs"


def _is_ours(config: Any) -> bool:
    """Say whether a dataset is of this package, which brings a dataclass for each."""
    foreign = isinstance(config, (CustomDataConfig, FreeDataConfig))
    return type(config).__module__.startswith("axonlaunch.") and not foreign


def _follow(batch: Batch) -> bool:
    """Say whether each target is the next input, but where another document begins."""
    expected = batch.inputs[:, 1:] == batch.targets[:, :-1]
    if batch.positions is not None:
        expected |= batch.positions[:, 1:] == 0
    return bool((expected | (batch.targets[:, :-1] == IGNORE_INDEX)).all())


def _row_problem(dataset: AnyText, indices: npt.NDArray[np.int64], batch: Batch) -> str:
    """Say what of rows of text is not what their documents say; empty if nothing."""
    for row, index in enumerate(indices.tolist()):
        pieces = [piece for _, piece in dataset.sources(index)]
        if any(piece.left is not None and len(piece.tokens) > piece.left for piece in pieces):
            return "the data: a row goes on past the end of a document as if it were the same one"
        tokens = np.concatenate([piece.tokens[:-1] for piece in pieces])
        targets = np.concatenate([np.where(p.counted, p.tokens, IGNORE_INDEX)[1:] for p in pieces])
        end = len(tokens)
        if not np.array_equal(batch.inputs[row, :end], tokens):
            return "the data: a row does not have the tokens of its documents"
        if not np.array_equal(batch.targets[row, :end], targets):
            return "the data: targets are not the tokens that follow in their document, and count"
        if bool((batch.targets[row, end:] != IGNORE_INDEX).any()):
            return "the data: targets count that are of no document"
        places = np.concatenate([np.arange(len(piece.tokens) - 1) for piece in pieces])
        if batch.positions is None:
            continue
        behind = batch.positions[row, end : end + 1]
        if not np.array_equal(batch.positions[row, :end], places) or bool(behind.any()):
            return "the data: positions are not those of tokens in their documents"
    return ""


def order_problem(loader: Loader, *, seed: int) -> str:
    """Say what is wrong with the order of samples, which both sides read by; empty if nothing is.

    An epoch is each sample once, in another order than the one before. Of a long one its first
    samples are looked at, and the steps at its ends.

    Args:
        loader: Of global batches.
        seed: The run's.
    """
    dataset = loader.dataset
    if isinstance(dataset, ShardedRows):
        return _shards_problem(dataset, seed=seed)
    is_mix = isinstance(dataset, TextMix)  # which counts on from one pass to the next
    if isinstance(loader, StreamLoader) or (dataset.info.order is not None and not is_mix):
        return ""  # which sample comes when is somebody else's to say
    samples = dataset.num_samples
    begins = np.arange(min(samples, _PLACES))
    by_place = [order_of(dataset, begins + epoch * samples, seed=seed) for epoch in (0, 1)]
    by_step = [_at_ends(loader, epoch) for epoch in (0, 1)]
    if is_mix:
        by_place, by_step = ([part % samples for part in parts] for parts in (by_place, by_step))
    for part in (*by_place, *by_step):
        if len(np.unique(part)) < len(part):
            return "the data: an epoch reads a sample twice"
        if part.min() < 0 or part.max() >= samples:
            return "the data: an epoch reads samples that are not there"
    for first, second in (by_place, by_step):
        if len(first) > _FEW and np.array_equal(first, second):
            return "the data: every epoch has its samples in the same order"
    return ""


def _shards_problem(dataset: ShardedRows, *, seed: int) -> str:
    """Say what is wrong with the order of rows in shards, if there are few; empty if nothing is."""
    if dataset.num_bytes > _SHARDS_BYTES:
        return ""
    shards = dataset.shard_rows()
    for number, (counted, filled) in enumerate(shards):
        if counted != filled:
            return f"the data: shard {number} is counted as {counted} rows and has {filled}"
    ends = np.cumsum([counted for counted, _ in shards])
    rows = int(ends[-1])
    if rows > _PLACES:
        return ""
    passes = [order_of(dataset, np.arange(rows) + n * rows, seed=seed) for n in range(_PASSES)]
    for part in passes:
        if not np.array_equal(np.sort(part), np.arange(rows)):
            return "the data: an epoch does not read each sample once"
    for end, (count, _) in zip(ends.tolist(), shards, strict=True):
        orders = [part[(part >= end - count) & (part < end)] for part in passes]
        same = (np.array_equal(*two) for two in itertools.pairwise(orders))
        if count > _FEW and any(same):
            return "the data: every epoch has the samples of a shard in the same order"
    return ""


def _at_ends(loader: Loader, epoch: int) -> npt.NDArray[np.int64]:
    """Return which samples the steps at both ends of an epoch read that are of this epoch."""
    size, samples = loader.global_batch_size, loader.dataset.num_samples
    looked_at = min(samples, _STEPS * size)
    ends = np.union1d(np.arange(looked_at), np.arange(samples - looked_at, samples))
    places = ends + epoch * samples
    steps = np.unique(places // size)
    read = np.concatenate([loader.indices(step) for step in steps.tolist()])
    return read[np.isin((steps[:, None] * size + np.arange(size)).ravel(), places)]


def random_problem(loader: Loader) -> str:
    """Say that a dataset gives another sample when it is read again, and why; empty if none."""
    if isinstance(loader, StreamLoader):
        return ""
    dataset, indices = loader.dataset, loader.indices(0)[:_FEW]
    states = _random_states()
    once = _fingerprints(dataset.samples(indices, split="train"))
    drawn = [name for name, state in _random_states().items() if state != states[name]]
    if once == _fingerprints(dataset.samples(indices, split="train")):
        return ""
    by = " and ".join(drawn) or "a generator of its own"
    return (
        "the data: a sample is another one when it is read again: the dataset itself is random, by "
        f"{by}; let what it draws follow from the index, as numpy.random.default_rng(index), or "
        "leave its augmentation out of a comparison"
    )


def _random_states() -> dict[str, bytes]:
    """Return the states of the generators that a dataset may draw from, by what they are called."""
    return {
        "Python's random": repr(random.getstate()).encode(),
        "numpy.random": repr(np.random.get_state(legacy=False)).encode(),
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
    }


def at_ends_of_epochs(loader: Loader) -> Iterator[int]:
    """Yield steps around the ends of two epochs, of which a comparison does none."""
    for epoch in (1, 2):
        last = epoch * loader.dataset.num_samples // loader.global_batch_size
        yield from range(max(0, last - 1), last + 2)


def other_ranks_samples(loader: Loader, whole: Loader, *, shard: int) -> int:
    """Return how many samples a shard reads, where epochs end, that are not its share of a batch.

    Args:
        loader: The shard's.
        whole: Of global batches.
        shard: Which one it is.
    """
    if isinstance(loader, StreamLoader):
        return 0
    wrong = 0
    for step in at_ends_of_epochs(whole):
        mine = loader.indices(step)
        share = whole.indices(step)[shard * len(mine) : (shard + 1) * len(mine)]
        wrong += int((mine != share).sum())
    return wrong


def held_out_problem(config: Any, loader: Loader, batches: Sequence[AnyBatch]) -> str:
    """Say what is wrong with what is held out, which both sides would do alike; empty if nothing.

    Args:
        config: Of the data.
        loader: Of global batches.
        batches: All held-out samples of an evaluation.
    """
    dataset, part = loader.dataset, np.asarray(evaluated_samples(loader))
    is_known = _is_ours(config) or isinstance(dataset, PairsDataset)
    if not is_known or not all(isinstance(batch, Batch) for batch in batches):
        return ""
    held_out = [*_read(dataset, part, "eval")]
    if Counter(held_out) != Counter(row for batch in batches for row in _fingerprints(batch)):
        return "the data: an evaluation does not read each held-out sample once"
    first = np.arange(min(dataset.num_samples, _COMPARED))
    samples = [*_read(dataset, first, "train")]
    repeats = len({*samples}) < _DISTINCT * len(samples)
    if not repeats and {*samples}.issuperset(held_out) and len({*held_out}) > 1:
        return "the data: every held-out sample that was looked at is one of training"
    return ""


def part_problem(loader: Loader, part: range | None, batches: Sequence[AnyBatch]) -> str:
    """Say that an evaluation of a part of the held-out samples reads others; empty if it does not.

    Args:
        loader: Of global batches.
        part: Which samples; None: all, or too many to look at.
        batches: Some of them.
    """
    if part is None or len(part) > _COMPARED:
        return ""
    if not all(isinstance(batch, Batch) for batch in batches):
        return ""
    once = Counter(_read(loader.dataset, np.asarray(part), "eval"))
    if Counter(row for batch in batches for row in _fingerprints(batch)) <= once:
        return ""
    return "the data: an evaluation of one source reads samples of another, or one twice"


def _read(dataset: Dataset, indices: npt.NDArray[np.int64], split: Split) -> Iterator[bytes]:
    """Yield the fingerprints of samples, of which a few are in memory at a time."""
    for begins in range(0, len(indices), _AT_ONCE):
        yield from _fingerprints(dataset.samples(indices[begins : begins + _AT_ONCE], split=split))


def _fingerprints(batch: AnyBatch) -> list[bytes]:
    """Return what tells the samples of a batch apart that have a target which counts.

    Of samples of any structure, what tells the batch apart that is made of all of them.
    """
    if not isinstance(batch, Batch):
        made = [part.whole for part in batch.micro_batches(len(batch))]
        return [_digest([leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)])]
    counted = len(batch) - batch.surplus
    rows = zip(batch.inputs[:counted], batch.targets[:counted], strict=True)
    return [_digest(row) for row in rows if bool((row[1] != IGNORE_INDEX).any())]


def _digest(tensors: Sequence[Tensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
