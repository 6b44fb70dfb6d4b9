"""Checks samples and their order, which are the same code in the layout and in the reference.

A comparison does not show wrong samples, because both read the same ones. Targets of custom
datasets are not checked, because their meaning is unknown.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axonlaunch.config.options.data import IGNORE_INDEX, CustomDataConfig, FreeDataConfig
from axonlaunch.data.datasets.dataset import AnyBatch, Batch, Split
from axonlaunch.data.datasets.loader import Loader, StreamLoader, order_of
from axonlaunch.data.datasets.user_datasets.adapters import PairsDataset
from axonlaunch.data.texts.mix import AnyText, TextMix
from axonlaunch.data.texts.sharded_rows import ShardedRows
from axonlaunch.verification.references.comparison_inputs import evaluated_samples

_COMPARED = 1024
"""Number of training samples that are searched for held-out samples."""
_DISTINCT = 0.9
"""Fraction of them that must be distinct; with many repetitions a match can be chance."""
_AT_ONCE = 16
"""Number of samples in memory at a time."""
_STEPS = 16
"""Steps at each end of an epoch for which the loader's sample numbers are checked: 0.1 ms each."""
_ORDERED = 2**14
"""Samples of an epoch with an order that is checked at once: 2 ms."""
_SHARDS_BYTES = 2**26
"""Largest size of files that are tokenized to check the order in their shards."""
_PASSES = 3
"""Passes over shards that are compared; the first one keeps the order of the files."""
_FEW = 16
"""Number of samples that are read twice. Two orders of fewer samples can be equal by chance."""


def data_problem(config: Any, loader: Loader, batch: AnyBatch, *, step: int) -> str:
    """Describe a fault in the samples of a step, or return an empty string.

    Args:
        config: Configuration of the data.
        loader: Loader of global batches.
        batch: Global batch of the step.
        step: Index of the step, from 0.
    """
    size, samples = loader.global_batch_size, loader.dataset.num_samples
    indices = loader.indices(step)
    current = set(indices.tolist())
    if samples >= (step + 1) * size:
        if len(current) < size:
            return f"the data: step {step + 1} reads a sample twice, of {samples} samples"
        if step and current & set(loader.indices(step - 1).tolist()):
            return f"the data: step {step + 1} repeats samples of the previous step"
    if not _is_included(config) or not isinstance(batch, Batch) or loader.dataset.kind != "tokens":
        return ""
    if isinstance(loader.dataset, AnyText):
        return _row_problem(loader.dataset, indices, batch)
    if _follow(batch):
        return ""
    return "the data: targets are not the tokens that follow their inputs"


def _is_included(config: Any) -> bool:
    """Return whether a dataset is part of this package, which has a dataclass for each."""
    is_custom = isinstance(config, (CustomDataConfig, FreeDataConfig))
    return type(config).__module__.startswith("axonlaunch.") and not is_custom


def _follow(batch: Batch) -> bool:
    """Return whether each target is the next input, except at the start of another document."""
    expected = batch.inputs[:, 1:] == batch.targets[:, :-1]
    if batch.positions is not None:
        expected |= batch.positions[:, 1:] == 0
    return bool((expected | (batch.targets[:, :-1] == IGNORE_INDEX)).all())


def _row_problem(dataset: AnyText, indices: npt.NDArray[np.int64], batch: Batch) -> str:
    """Describe a row of text that does not match its documents; empty if all rows match."""
    for row, index in enumerate(indices.tolist()):
        pieces = [piece for _, piece in dataset.sources(index)]
        if any(piece.left is not None and len(piece.tokens) > piece.left for piece in pieces):
            return "the data: a row continues past the end of a document as if it were one document"
        tokens = np.concatenate([piece.tokens[:-1] for piece in pieces])
        targets = np.concatenate([np.where(p.counted, p.tokens, IGNORE_INDEX)[1:] for p in pieces])
        end = len(tokens)
        if not np.array_equal(batch.inputs[row, :end], tokens):
            return "the data: tokens of a row differ from those of its documents"
        if not np.array_equal(batch.targets[row, :end], targets):
            return "the data: targets are not the counted next tokens of their document"
        if bool((batch.targets[row, end:] != IGNORE_INDEX).any()):
            return "the data: targets after the last document of a row are counted"
        positions = np.concatenate([np.arange(len(piece.tokens) - 1) for piece in pieces])
        if batch.positions is None:
            continue
        padding = batch.positions[row, end : end + 1]
        if not np.array_equal(batch.positions[row, :end], positions) or bool(padding.any()):
            return "the data: positions do not start at 0 in each document and count up by 1"
    return ""


def order_problem(loader: Loader, *, seed: int) -> str:
    """Describe a fault in the order of samples, or return an empty string.

    An epoch must read each sample once, in a different order than the previous epoch. For long
    epochs only the first samples and the steps at both ends are checked.

    Args:
        loader: Loader of global batches.
        seed: Seed of the run.
    """
    dataset = loader.dataset
    if isinstance(dataset, ShardedRows):
        return _shards_problem(dataset, seed=seed)
    is_mix = isinstance(dataset, TextMix)  # with sample numbers that continue across passes
    if isinstance(loader, StreamLoader) or (dataset.info.order is not None and not is_mix):
        return ""  # the dataset defines its own order
    samples = dataset.num_samples
    begins = np.arange(min(samples, _ORDERED))
    by_index = [order_of(dataset, begins + epoch * samples, seed=seed) for epoch in (0, 1)]
    by_step = [_at_ends(loader, epoch) for epoch in (0, 1)]
    if is_mix:
        by_index, by_step = ([part % samples for part in parts] for parts in (by_index, by_step))
    for part in (*by_index, *by_step):
        if len(np.unique(part)) < len(part):
            return "the data: an epoch reads a sample twice"
        if part.min() < 0 or part.max() >= samples:
            return "the data: an epoch reads samples that do not exist"
    for first, second in (by_index, by_step):
        if len(first) > _FEW and np.array_equal(first, second):
            return "the data: every epoch reads samples in the same order"
    return ""


def _shards_problem(dataset: ShardedRows, *, seed: int) -> str:
    """Describe a fault in the order of rows in small shards, or return an empty string."""
    if dataset.num_bytes > _SHARDS_BYTES:
        return ""
    shards = dataset.shard_rows()
    for number, (counted, filled) in enumerate(shards):
        if counted != filled:
            return f"the data: shard {number} has {filled} rows, but {counted} were counted"
    ends = np.cumsum([counted for counted, _ in shards])
    rows = int(ends[-1])
    if rows > _ORDERED:
        return ""
    passes = [order_of(dataset, np.arange(rows) + n * rows, seed=seed) for n in range(_PASSES)]
    for part in passes:
        if not np.array_equal(np.sort(part), np.arange(rows)):
            return "the data: an epoch does not read each sample once"
    for end, (count, _) in zip(ends.tolist(), shards, strict=True):
        orders = [part[(part >= end - count) & (part < end)] for part in passes]
        same = (np.array_equal(*two) for two in itertools.pairwise(orders))
        if count > _FEW and any(same):
            return "the data: every epoch reads the samples of a shard in the same order"
    return ""


def _at_ends(loader: Loader, epoch: int) -> npt.NDArray[np.int64]:
    """Return the samples of an epoch that the steps at both of its ends read."""
    size, samples = loader.global_batch_size, loader.dataset.num_samples
    checked = min(samples, _STEPS * size)
    ends = np.union1d(np.arange(checked), np.arange(samples - checked, samples))
    indices = ends + epoch * samples
    steps = np.unique(indices // size)
    read = np.concatenate([loader.indices(step) for step in steps.tolist()])
    return read[np.isin((steps[:, None] * size + np.arange(size)).ravel(), indices)]


def random_problem(loader: Loader) -> str:
    """Describe a dataset with random samples; empty if its samples are reproducible.

    The loader seeds the global generators for each sample. The samples are therefore random only if
    the dataset uses another generator.
    """
    if isinstance(loader, StreamLoader):
        return ""
    indices = loader.indices(0)[:_FEW]
    first, second = (_fingerprints(loader.read(indices, split="train")) for _ in range(2))
    if first == second:
        return ""
    return (
        "Reading the same sample twice gave different values: the dataset uses random numbers of a "
        "generator of its own. Use the functions of torch, numpy.random or Python's random, which "
        "are seeded for each sample, or seed the generator with the sample's index, for example "
        "numpy.random.default_rng(index)"
    )


def at_ends_of_epochs(loader: Loader) -> Iterator[int]:
    """Yield the steps around the ends of two epochs."""
    for epoch in (1, 2):
        last = epoch * loader.dataset.num_samples // loader.global_batch_size
        yield from range(max(0, last - 1), last + 2)


def other_ranks_samples(loader: Loader, global_loader: Loader, *, shard: int) -> int:
    """Count samples that a shard reads at the ends of epochs and that belong to another shard.

    Args:
        loader: Loader of the shard.
        global_loader: Loader of global batches.
        shard: Index of the shard.
    """
    if isinstance(loader, StreamLoader):
        return 0
    wrong = 0
    for step in at_ends_of_epochs(global_loader):
        actual = loader.indices(step)
        expected = global_loader.indices(step)[shard * len(actual) : (shard + 1) * len(actual)]
        wrong += int((actual != expected).sum())
    return wrong


def held_out_problem(config: Any, loader: Loader, batches: Sequence[AnyBatch]) -> str:
    """Describe a fault in the held-out samples of an evaluation, or return an empty string.

    Args:
        config: Configuration of the data.
        loader: Loader of global batches.
        batches: All batches of the evaluation.
    """
    dataset, part = loader.dataset, np.asarray(evaluated_samples(loader))
    has_pairs = _is_included(config) or isinstance(dataset, PairsDataset)
    if not has_pairs or not all(isinstance(batch, Batch) for batch in batches):
        return ""
    held_out = [*_read(loader, part, "eval")]
    if Counter(held_out) != Counter(row for batch in batches for row in _fingerprints(batch)):
        return "the data: an evaluation does not read each held-out sample once"
    first = np.arange(min(dataset.num_samples, _COMPARED))
    samples = [*_read(loader, first, "train")]
    repeats = len({*samples}) < _DISTINCT * len(samples)
    if not repeats and {*samples}.issuperset(held_out) and len({*held_out}) > 1:
        return "the data: every held-out sample is also one of the first training samples"
    return ""


def part_problem(loader: Loader, part: range | None, batches: Sequence[AnyBatch]) -> str:
    """Describe an evaluation of one source that reads other samples; empty if there is no fault.

    Args:
        loader: Loader of global batches.
        part: Held-out samples of the source; None for all samples, which is not checked.
        batches: Batches that the evaluation reads.
    """
    if part is None or len(part) > _COMPARED:
        return ""
    if not all(isinstance(batch, Batch) for batch in batches):
        return ""
    allowed = Counter(_read(loader, np.asarray(part), "eval"))
    if Counter(row for batch in batches for row in _fingerprints(batch)) <= allowed:
        return ""
    return "the data: an evaluation of one source reads samples of another source, or repeats one"


def _read(loader: Loader, indices: npt.NDArray[np.int64], split: Split) -> Iterator[bytes]:
    """Yield the fingerprints of samples, with few samples in memory at a time."""
    for start in range(0, len(indices), _AT_ONCE):
        yield from _fingerprints(loader.read(indices[start : start + _AT_ONCE], split=split))


def _fingerprints(batch: AnyBatch) -> list[bytes]:
    """Return a hash of each sample that has a counted target.

    For samples of arbitrary structure, return one hash of the batch that they are collated to.
    """
    if not isinstance(batch, Batch):
        collated = [part.full for part in batch.micro_batches(len(batch))]
        return [_digest([leaf for leaf in tree_leaves(collated) if isinstance(leaf, Tensor)])]
    counted = len(batch) - batch.surplus
    rows = zip(batch.inputs[:counted], batch.targets[:counted], strict=True)
    return [_digest(row) for row in rows if bool((row[1] != IGNORE_INDEX).any())]


def _digest(tensors: Sequence[Tensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
