"""What both sides of a comparison read alike, held against what the data says it is.

A layout and one process that read wrong samples agree. What a dataset of somebody's own means by
its targets is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.data import IGNORE_INDEX, CustomDataConfig, FreeDataConfig
from axonlaunch.data.dataset import AnyBatch, Batch
from axonlaunch.data.loader import Loader, StreamLoader, order_of
from axonlaunch.data.mix import AnyText
from axonlaunch.data.own import PairsDataset
from axonlaunch.verification.inputs import evaluated

_COMPARED = 1024
"""Samples of training that held-out ones are looked for among."""
_DISTINCT = 0.9
"""Share of these that must differ: among those that repeat anyway one is found by chance."""
_ORDERED = 2**14
"""Samples of an epoch whose order is looked at."""
_FEW = 16
"""Samples that two epochs may have in the same order by chance."""


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

    Args:
        loader: Of global batches.
        seed: The run's.
    """
    dataset = loader.dataset
    if isinstance(loader, StreamLoader) or hasattr(dataset, "order"):
        return ""  # which sample comes when is somebody else's to say
    places = np.arange(min(dataset.num_samples, _ORDERED))
    first, second = (
        order_of(dataset, places + begins, seed=seed) for begins in (0, dataset.num_samples)
    )
    for epoch in (first, second):
        if len(np.unique(epoch)) < len(places):
            return "the data: an epoch reads a sample twice"
    if len(places) > _FEW and np.array_equal(first, second):
        return "the data: every epoch has its samples in the same order"
    size = loader.global_batch_size
    for step in at_ends_of_epochs(loader):
        expected = order_of(dataset, np.arange(step * size, (step + 1) * size), seed=seed)
        if not np.array_equal(loader.indices(step), expected):
            return f"the data: step {step + 1}, where an epoch ends, does not read on in its order"
    return ""


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
    dataset, part = loader.dataset, np.asarray(evaluated(loader))
    once = dataset.samples(part, split="eval")
    is_known = _is_ours(config) or isinstance(dataset, PairsDataset)
    if not is_known or not isinstance(once, Batch):
        return ""
    if Counter(_rows_of(once)) != Counter(row for batch in batches for row in _rows_of(batch)):
        return "the data: an evaluation does not read each held-out sample once"
    first = np.arange(min(dataset.num_samples, _COMPARED))
    samples = _rows_of(dataset.samples(first, split="train"))
    repeats = len({*samples}) < _DISTINCT * len(samples)
    if not repeats and {*samples}.issuperset(held_out := _rows_of(once)) and len({*held_out}) > 1:
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
    once = loader.dataset.samples(np.asarray(part), split="eval")
    if not isinstance(once, Batch):
        return ""
    if Counter(row for b in batches for row in _rows_of(b)) <= Counter(_rows_of(once)):
        return ""
    return "the data: an evaluation of one source reads samples of another, or one twice"


def _rows_of(batch: AnyBatch) -> list[bytes]:
    """Return the samples of a batch that have a target which counts."""
    assert isinstance(batch, Batch)
    rows = zip(batch.inputs, batch.targets, strict=True)
    return [
        inputs.numpy().tobytes() + targets.numpy().tobytes()
        for inputs, targets in rows
        if bool((targets != IGNORE_INDEX).any())
    ]
