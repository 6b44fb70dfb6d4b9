"""Adapts user-defined datasets to the interface ``data.datasets.dataset.Dataset``.

Supported are map-style and iterable datasets, as in torch, with samples of any structure. The
loader decides which samples of a stream a step sees.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from axonlaunch.data.datasets.dataset import (
    AnyBatch,
    Batch,
    DatasetInfo,
    DatasetWithoutText,
    Kind,
    Split,
)
from axonlaunch.data.datasets.samples import Collate, SampleOrigin, Samples, collating
from axonlaunch.data.datasets.user_datasets.members import (
    MapStyle,
    OptionalMembers,
    missing_members,
)
from axonlaunch.data.reading.progress import begin_sample
from axonlaunch.data.reading.random_numbers import (
    generator_states,
    have_moved,
    kept_generators,
    sample_seed,
    seed_generators,
)
from axonlaunch.data.reading.sample_error import naming
from axonlaunch.system.text.units import Counted

_EVAL_FRACTION = 0.05
_HELD_OUT, _BEGINS = 1, 2
"""Parts of ``sample_seed``; training samples are part 0."""

Refusal = Callable[[str], Exception]


@runtime_checkable
class _ConvertsToArray(Protocol):
    """A tensor, an array or another object that numpy converts."""

    def __array__(self) -> npt.NDArray[Any]: ...


def adapt_dataset(
    dataset: Any,
    *,
    collate: Collate | None,
    eval_fraction: float | None,
    num_classes: int | None,
    refusal: Refusal,
    description: str,
    num_workers: int = 0,
) -> UserDataset:
    """Adapt the return value of a user's builder to the interface of datasets.

    Args:
        dataset: The return value.
        collate: Combines samples to a batch; None: torch's default, or for pairs of inputs and
            targets a ``Batch``.
        eval_fraction: Share of a map-style dataset that is held out if it has no ``held_out``;
            None: 5 %.
        num_classes: Number of classes of pairs; None: read from the dataset.
        refusal: Creates the error for a reason.
        description: The dataset in errors, such as "data=custom (my_data:Images)".
        num_workers: Configured number of processes that read it; 0: the rank's process.

    Raises:
        ConfigError: The value is not a dataset, or the dataset is empty.
    """
    adapted = _adapt(dataset, collate, eval_fraction, num_classes, refusal)
    adapted.description, adapted.num_workers = description, num_workers
    return adapted


def _adapt(
    dataset: Any,
    collate: Collate | None,
    eval_fraction: float | None,
    num_classes: int | None,
    refusal: Refusal,
) -> UserDataset:
    members = OptionalMembers(dataset)
    if not (missing := missing_members(dataset)):
        return BatchedDataset(dataset, members)
    share = _EVAL_FRACTION if eval_fraction is None else eval_fraction
    if isinstance(dataset, MapStyle) and not _is_stream(dataset):
        if not len(dataset):
            raise refusal("its dataset is empty")
        divided = _Divided(dataset, members, share, refusal)
        if collate is None and _is_pair(first := dataset[0]):
            if num_classes is None:
                num_classes = members.num_classes
            return PairsDataset(divided, first, num_classes, refusal)
        return IndexedSamples(divided, collate)
    if isinstance(dataset, Iterable):
        return StreamedSamples(dataset, members, collate, refusal)
    raise refusal(
        f"returned {type(dataset).__name__}, which is neither a map-style dataset (__len__ and "
        "__getitem__), nor a stream (__iter__), nor an axonlaunch Dataset: it has no "
        f"{', '.join(missing)}"
    )


class UserDataset(DatasetWithoutText, ABC):
    """Base class of the adapters, which seed the random numbers of each sample.

    Attributes:
        description: The dataset in errors.
        num_workers: Configured number of processes that read it; 0: the rank's process.
    """

    description = "data"
    num_workers = 0
    kind: Kind
    num_samples: int
    num_eval_samples: int
    num_classes: int
    sample_shape: tuple[int, ...]

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> AnyBatch:
        """Return the samples with these indices, with the random numbers of seed 0 and epoch 0."""
        return self.read(indices, split=split, seed=0, epochs=itertools.repeat(0))

    def read(
        self,
        indices: Sequence[int] | npt.NDArray[np.int64],
        *,
        split: Split,
        seed: int,
        epochs: Iterable[int],
    ) -> AnyBatch:
        """Return the samples with these indices, in this order.

        The global random generators have their previous states afterwards.

        Args:
            indices: Indices of the samples.
            split: Whether they are training or held-out samples.
            seed: Seed of the run.
            epochs: Number of each sample's pass over the data.

        Raises:
            SampleError: The user's code failed.
            ConfigError: Samples do not fit together.
        """
        part = _HELD_OUT if split == "eval" else 0
        origins = [
            SampleOrigin(
                self.description,
                self.name(int(index), split),
                sample_seed(seed, int(epoch), int(index), part=part),
            )
            for index, epoch in zip(indices, epochs, strict=False)
        ]
        with kept_generators():
            return self._read([int(index) for index in indices], split, origins)

    def name(self, index: int, split: Split) -> str:
        """Return the name of a sample for an error."""
        return f"sample {index}" if split == "train" else f"held-out sample {index}"

    @abstractmethod
    def _read(self, indices: list[int], split: Split, origins: list[SampleOrigin]) -> AnyBatch:
        """Read the samples with the random numbers of their origins."""


def _reading(origin: SampleOrigin) -> AbstractContextManager[None]:
    """Seed the generators for a sample, and return a context that names it in exceptions."""
    begin_sample(origin.name)
    seed_generators(origin.seed)
    return naming(f"{origin.dataset}: reading {origin.name}")


class BatchedDataset(UserDataset):
    """A user's dataset that returns whole batches, with the interface ``Dataset``."""

    def __init__(self, dataset: Any, members: OptionalMembers) -> None:
        self._dataset, self._members = dataset, members
        self.kind = dataset.kind
        self.num_samples = dataset.num_samples
        self.num_eval_samples = dataset.num_eval_samples
        self.num_classes = dataset.num_classes
        self.sample_shape = dataset.sample_shape
        self.is_text = members.is_text

    @property
    def info(self) -> DatasetInfo:
        """Optional facts, of the dataset if it has them."""
        return self._members.info

    def encode(self, text: str) -> list[int]:
        """Convert text to tokens; only if ``is_text``."""
        tokens: list[int] = self._dataset.encode(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text; only if ``is_text``."""
        text: str = self._dataset.decode(tokens)
        return text

    def _read(self, indices: list[int], split: Split, origins: list[SampleOrigin]) -> AnyBatch:
        """Read all samples at once, or one at a time if the dataset draws random numbers."""
        full = origins[0]
        if len(origins) > 1:
            full = replace(full, name=f"{full.name} to {origins[-1].name}")
        with _reading(full):
            states = generator_states()
            batch: AnyBatch = self._dataset.samples(np.asarray(indices), split=split)
            if len(indices) > 1 and have_moved(states):
                parts = [
                    self._read([index], split, [origin])
                    for index, origin in zip(indices, origins, strict=True)
                ]
                batch = type(parts[0]).join(parts)  # type: ignore[arg-type]  # all of one class
        return batch if isinstance(batch, Batch) else replace(batch, origins=origins)


class _Divided:
    """A map-style dataset with its held-out samples: ``held_out``, or else its last samples."""

    def __init__(
        self, dataset: MapStyle, members: OptionalMembers, eval_fraction: float, refusal: Refusal
    ) -> None:
        """Choose the held-out samples.

        Raises:
            ConfigError: ``held_out`` is not a map-style dataset.
        """
        self._dataset, self._held_out = dataset, _held_out(members, refusal)
        if self._held_out is None:
            self.num_eval_samples = round(len(dataset) * eval_fraction)
            self.num_samples = len(dataset) - self.num_eval_samples
        else:
            self.num_eval_samples, self.num_samples = len(self._held_out), len(dataset)

    def items(self, indices: list[int], split: Split, origins: list[SampleOrigin]) -> list[Any]:
        """Return samples with the random numbers of their origins."""
        items = []
        for index, origin in zip(indices, origins, strict=True):
            with _reading(origin):
                items.append(self._item(index, split))
        return items

    def _item(self, index: int, split: Split) -> Any:
        if split == "train":
            return self._dataset[index]
        if self._held_out is None:
            return self._dataset[self.num_samples + index]
        return self._held_out[index]

    def name(self, index: int, split: Split) -> str:
        """Return the name of a sample for an error."""
        if split == "eval" and self._held_out is not None:
            return f"held_out[{index}]"
        return f"sample {index + (self.num_samples if split == 'eval' else 0)}"


class PairsDataset(UserDataset):
    """A map-style dataset with items ``(inputs, targets)``."""

    def __init__(
        self, pairs: _Divided, first: Any, num_classes: int | None, refusal: Refusal
    ) -> None:
        """Read shapes and types from the first item.

        Args:
            pairs: The dataset with its held-out samples.
            first: First item of the dataset.
            num_classes: Number of classes; None: unknown.
            refusal: Creates the error for a reason.

        Raises:
            ConfigError: The number of classes is unknown.
        """
        self._pairs, self._refusal = pairs, refusal
        inputs, targets = (np.asarray(part) for part in first)
        self._float_targets = targets.shape if _is_float(targets) else None
        self.kind: Kind = "tokens" if np.issubdtype(inputs.dtype, np.integer) else "images"
        self.sample_shape = inputs.shape
        self._counted = _unit_of_targets(self.kind, inputs.shape, targets.shape)
        if self._float_targets is not None:
            num_classes = 0
        elif num_classes is None:
            raise refusal(
                "the dataset has no attribute num_classes or vocab_size; set data.num_classes"
            )
        self.num_classes = num_classes
        self.num_eval_samples = self._pairs.num_eval_samples
        self.num_samples = self._pairs.num_samples

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(float_targets=self._float_targets, counted=self._counted)

    def name(self, index: int, split: Split) -> str:
        """Return the name of a sample for an error."""
        return self._pairs.name(index, split)

    def _read(self, indices: list[int], split: Split, origins: list[SampleOrigin]) -> Batch:
        """Read and stack pairs.

        Raises:
            ConfigError: Shapes differ, or a target is a float although that of sample 0 is not.
        """
        pairs = self._pairs.items(indices, split, origins)
        names = [origin.name for origin in origins]
        dtype = np.int64 if self.kind == "tokens" else np.float32
        inputs = [np.asarray(pair[0], dtype=dtype) for pair in pairs]
        targets = [np.asarray(pair[1]) for pair in pairs]
        for what, arrays in (("inputs", inputs), ("targets", targets)):
            self._check_shapes(what, arrays, names)
        return Batch.from_numpy(np.stack(inputs), self._stack_targets(targets, names))

    def _stack_targets(self, targets: list[npt.NDArray[Any]], names: list[str]) -> npt.NDArray[Any]:
        if self._float_targets is not None:
            return np.stack(targets).astype(np.float32)
        for target, name in zip(targets, names, strict=True):
            if _is_float(target):
                raise self._refusal(
                    f"targets of {name} are {target.dtype}, that of sample 0 an integer; "
                    "give all as floats, or all as integers"
                )
        return np.stack(targets)

    def _check_shapes(self, what: str, arrays: list[npt.NDArray[Any]], names: list[str]) -> None:
        for array, name in zip(arrays, names, strict=True):
            if array.shape != arrays[0].shape:
                raise self._refusal(
                    f"{what} of {name} have shape {list(array.shape)}, those of {names[0]} "
                    f"{list(arrays[0].shape)}: a batch has samples of one shape; pad "
                    "them, or make batches by a custom function, data.collate"
                )


class _StructuredSamples(UserDataset):
    """Base class for datasets with samples of any structure."""

    kind: Kind = "structured"
    num_classes = 0
    sample_shape: tuple[int, ...] = ()

    def __init__(self, collate: Collate | None) -> None:
        """Store the collate function; None: torch's default."""
        self.collate = collating(collate)


class IndexedSamples(_StructuredSamples):
    """A map-style dataset with samples of any structure."""

    def __init__(self, divided: _Divided, collate: Collate | None) -> None:
        super().__init__(collate)
        self._divided = divided
        self.num_eval_samples = self._divided.num_eval_samples
        self.num_samples = self._divided.num_samples

    def name(self, index: int, split: Split) -> str:
        """Return the name of a sample for an error."""
        return self._divided.name(index, split)

    def _read(self, indices: list[int], split: Split, origins: list[SampleOrigin]) -> Samples:
        return Samples(self._divided.items(indices, split, origins), self.collate, origins=origins)


class StreamedSamples(_StructuredSamples):
    """An iterable dataset, read from start to end repeatedly.

    Attributes:
        num_samples: Samples of one pass, from ``__len__``; 0: unknown.
        has_state: Whether it can save its position, so that a resumed run continues there instead
            of reading all earlier samples again.
    """

    def __init__(
        self, dataset: Any, members: OptionalMembers, collate: Collate | None, refusal: Refusal
    ) -> None:
        """Read the length, and check ``held_out`` and the state.

        Raises:
            ConfigError: The dataset has only one of ``state_dict`` and ``load_state_dict``, its
                state can't be written as JSON, or ``held_out`` is not a dataset.
        """
        super().__init__(collate)
        self._dataset, self._held_out = dataset, _held_out(members, refusal)
        self._members = members
        self.num_eval_samples = 0 if self._held_out is None else len(self._held_out)
        try:
            self.num_samples = len(dataset)
        except (TypeError, NotImplementedError):
            self.num_samples = 0
        self.has_state = members.state_dict is not None
        if self.has_state != (members.load_state_dict is not None):
            raise refusal("it has one of state_dict and load_state_dict; it needs both, or neither")
        if self.has_state:
            try:
                self.state()
            except (TypeError, ValueError) as error:
                message = f"its state_dict() can't be written as JSON ({error}); use numbers, text"
                raise refusal(f"{message}, lists and dicts with keys of text") from None

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        notes = []
        if not self.has_state:
            notes.append(
                "data: a stream without state_dict; a resumed run reads all earlier samples again"
            )
        if self.num_workers > 1:
            notes.append(
                f"data.workers={self.num_workers}: a stream has one order, so one process per rank "
                f"reads it; a dataset with __getitem__ and __len__ is read by {self.num_workers}"
            )
        return DatasetInfo(notes=tuple(notes), is_unsized=not self.num_samples)

    def state(self) -> str:
        """Return the position as JSON."""
        assert self._members.state_dict is not None
        return json.dumps(self._members.state_dict(), allow_nan=False)

    def load_state(self, state: str) -> None:
        """Return to a position."""
        assert self._members.load_state_dict is not None
        self._members.load_state_dict(json.loads(state))

    def begin(self, epoch: int, *, seed: int) -> None:
        """Set the number of the next pass; ``set_epoch`` may draw random numbers."""
        if self._members.set_epoch is not None:
            with kept_generators():
                seed_generators(sample_seed(seed, epoch, 0, part=_BEGINS))
                self._members.set_epoch(epoch)

    def passes(self, *, seed: int, epoch: int, position: int) -> Iterator[tuple[Any, SampleOrigin]]:
        """Yield the samples of a pass with their origins, or the rest of it after ``load_state``.

        Reading a sample leaves the global generators in the state that the sample leaves them in.

        Args:
            seed: Seed of the run.
            epoch: Number of the pass.
            position: Position of the first sample in the pass.
        """
        samples: Iterator[Any] | None = None
        for at in itertools.count(position):
            name = f"sample {at} of pass {epoch}"
            origin = SampleOrigin(self.description, name, sample_seed(seed, epoch, at))
            with _reading(origin):
                samples = iter(self._dataset) if samples is None else samples
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            yield sample, origin

    def first(self, count: int) -> Samples:
        """Return the first samples, with the random numbers of seed 0."""
        with kept_generators():
            read = itertools.islice(self.passes(seed=0, epoch=0, position=0), count)
            items, origins = [list(part) for part in zip(*read, strict=True)] or ([], [])
        return Samples(items, self.collate, origins=origins)

    def _read(self, indices: list[int], split: Split, origins: list[SampleOrigin]) -> Samples:
        """Read held-out samples; those of the stream have no index."""
        assert split == "eval"
        assert self._held_out is not None
        items = []
        for index, origin in zip(indices, origins, strict=True):
            with _reading(origin):
                items.append(self._held_out[index])
        return Samples(items, self.collate, origins=origins)


def _held_out(members: OptionalMembers, refusal: Refusal) -> MapStyle | None:
    """Return the held-out samples of a dataset; None if it has none.

    Raises:
        ConfigError: ``held_out`` has no length, or can't be indexed.
    """
    held_out = members.held_out
    if held_out is None or isinstance(held_out, MapStyle):
        return held_out
    kind = type(held_out).__name__
    raise refusal(f"its held_out is {kind}, without __len__ and __getitem__; it needs both")


def _is_stream(dataset: Any) -> bool:
    """Return whether it is torch's ``IterableDataset``, which has a failing ``__getitem__``."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _is_pair(item: Any) -> bool:
    """Return whether an item is a pair of inputs and targets: tensors, arrays or numbers."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return all(isinstance(part, _ConvertsToArray | int | float) for part in item)


def _unit_of_targets(kind: Kind, inputs: tuple[int, ...], targets: tuple[int, ...]) -> Counted:
    """Return the unit that has one target each, for samples with these shapes.

    Inputs [C, H, W] are images even if their elements are integers.
    """
    if not targets:
        return "images" if len(inputs) == 3 else "samples"
    return "tokens" if kind == "tokens" and targets == inputs else "targets"


def _is_float(array: npt.NDArray[Any]) -> bool:
    return np.issubdtype(array.dtype, np.floating)
