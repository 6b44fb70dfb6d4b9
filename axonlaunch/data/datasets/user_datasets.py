"""Adapts user-defined datasets to the interface ``data.datasets.dataset.Dataset``.

Supported are map-style and iterable datasets, as in torch, with samples of any structure. The
loader decides which samples of a stream a step sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from axonlaunch.data.datasets.dataset import Batch, Dataset, DatasetInfo, Kind, NoText, Split
from axonlaunch.data.datasets.samples import Collate, Samples, collating
from axonlaunch.system.text.units import Counted

_DATASET = ("kind", "num_samples", "num_eval_samples", "num_classes", "sample_shape", "samples")
_EVAL_FRACTION = 0.05

Refusal = Callable[[str], Exception]


def adapt_dataset(
    dataset: Any,
    *,
    collate: Collate | None,
    eval_fraction: float | None,
    num_classes: int | None,
    refusal: Refusal,
) -> Dataset:
    """Adapt the return value of a user's builder to the interface of datasets.

    Args:
        dataset: The return value.
        collate: Combines samples to a batch; None: torch's default, or for pairs of inputs and
            targets a ``Batch``.
        eval_fraction: Share of a map-style dataset that is held out if it has no ``held_out``;
            None: 5 %.
        num_classes: Number of classes of pairs; None: read from the dataset.
        refusal: Creates the error for a reason.

    Raises:
        ConfigError: It is not a dataset, or it is empty.
    """
    if all(hasattr(dataset, name) for name in _DATASET):
        return cast("Dataset", dataset if hasattr(dataset, "info") else _WithInfo(dataset))
    share = _EVAL_FRACTION if eval_fraction is None else eval_fraction
    if not _is_stream(dataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not len(dataset):
            raise refusal("its dataset is empty")
        if collate is None and _is_pair(dataset[0]):
            return PairsDataset(dataset, num_classes, share, refusal)
        return IndexedSamples(dataset, collate, share, refusal)
    if hasattr(dataset, "__iter__"):
        return StreamedSamples(dataset, collate, refusal)
    missing = ", ".join(name for name in _DATASET if not hasattr(dataset, name))
    raise refusal(
        f"returned {type(dataset).__name__}, which is neither a map-style dataset (__len__ and "
        f"__getitem__), nor a stream (__iter__), nor an axonlaunch Dataset: it has no {missing}"
    )


class _WithInfo:
    """A user's dataset without ``info``, with the default facts added."""

    info = DatasetInfo()

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


class _Divided:
    """A map-style dataset with its held-out samples: ``held_out``, or else its last samples."""

    def __init__(self, dataset: Any, eval_fraction: float, refusal: Refusal) -> None:
        self._dataset, self._held_out = dataset, _held_out(dataset, refusal)
        if self._held_out is None:
            self.num_eval_samples = round(len(dataset) * eval_fraction)
            self.num_samples = len(dataset) - self.num_eval_samples
        else:
            self.num_eval_samples, self.num_samples = len(self._held_out), len(dataset)

    def item(self, index: int, split: Split) -> Any:
        """Return one sample."""
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


class PairsDataset(NoText):
    """A map-style dataset with items ``(inputs, targets)``."""

    def __init__(
        self, pairs: Any, num_classes: int | None, eval_fraction: float, refusal: Refusal
    ) -> None:
        """Read shapes and types from the first item.

        Raises:
            ConfigError: The number of classes is unknown, or ``held_out`` is not a dataset.
        """
        self._pairs, self._refusal = _Divided(pairs, eval_fraction, refusal), refusal
        inputs, targets = (np.asarray(part) for part in pairs[0])
        self._float_targets = targets.shape if _is_float(targets) else None
        self.kind: Kind = "tokens" if np.issubdtype(inputs.dtype, np.integer) else "images"
        self.sample_shape = inputs.shape
        self._counted = _counted(self.kind, inputs.shape, targets.shape)
        has_classes = self._float_targets is None
        self.num_classes = _num_classes(pairs, num_classes, refusal) if has_classes else 0
        self.num_eval_samples = self._pairs.num_eval_samples
        self.num_samples = self._pairs.num_samples

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(float_targets=self._float_targets, counted=self._counted)

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the samples with these indices, in this order.

        Raises:
            ConfigError: Shapes differ, or a target is a float although that of sample 0 is not.
        """
        pairs = [self._pairs.item(int(index), split) for index in indices]
        names = [self._pairs.name(int(index), split) for index in indices]
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


class _StructuredSamples(NoText):
    """Base class for datasets with samples of any structure."""

    kind: Kind = "structured"
    num_classes = 0
    sample_shape: tuple[int, ...] = ()

    def __init__(self, collate: Collate | None) -> None:
        """Store the collate function; None: torch's default."""
        self.collate = collating(collate)

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Samples:
        """Return the samples with these indices, in this order."""
        return Samples([self.item(int(index), split) for index in indices], self.collate)

    def item(self, index: int, split: Split) -> Any:
        """Return one sample."""
        raise NotImplementedError


class IndexedSamples(_StructuredSamples):
    """A map-style dataset; its last samples are held out if it has no ``held_out``."""

    def __init__(
        self, dataset: Any, collate: Collate | None, eval_fraction: float, refusal: Refusal
    ) -> None:
        """Choose the held-out samples.

        Raises:
            ConfigError: ``held_out`` is not a dataset.
        """
        super().__init__(collate)
        self._divided = _Divided(dataset, eval_fraction, refusal)
        self.num_eval_samples = self._divided.num_eval_samples
        self.num_samples = self._divided.num_samples

    def item(self, index: int, split: Split) -> Any:
        """Return one sample."""
        return self._divided.item(index, split)


class StreamedSamples(_StructuredSamples):
    """An iterable dataset, read from start to end repeatedly.

    Attributes:
        num_samples: Samples of one pass, from ``__len__``; 0: unknown.
        has_state: Whether it can save its position, so that a resumed run continues there instead
            of reading all earlier samples again.
    """

    def __init__(self, dataset: Any, collate: Collate | None, refusal: Refusal) -> None:
        """Read the length, and check ``held_out`` and the state.

        Raises:
            ConfigError: It has only one of ``state_dict`` and ``load_state_dict``, its state can't
                be written as JSON, or ``held_out`` is not a dataset.
        """
        super().__init__(collate)
        self._dataset, self._held_out = dataset, _held_out(dataset, refusal)
        self.num_eval_samples = 0 if self._held_out is None else len(self._held_out)
        try:
            self.num_samples = len(dataset)
        except (TypeError, NotImplementedError):
            self.num_samples = 0
        halves = [hasattr(dataset, name) for name in ("state_dict", "load_state_dict")]
        if any(halves) and not all(halves):
            raise refusal("it has one of state_dict and load_state_dict; it needs both, or neither")
        self.has_state = all(halves)
        if self.has_state:
            try:
                self.state()
            except (TypeError, ValueError) as error:
                message = f"its state_dict() can't be written as JSON ({error}); use numbers, text"
                raise refusal(f"{message}, lists and dicts with keys of text") from None

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        note = "data: a stream without state_dict; a resumed run reads all earlier samples again"
        return DatasetInfo(notes=() if self.has_state else (note,), is_unsized=not self.num_samples)

    def state(self) -> str:
        """Return the position as JSON."""
        return json.dumps(self._dataset.state_dict(), allow_nan=False)

    def load_state(self, state: str) -> None:
        """Return to a position."""
        self._dataset.load_state_dict(json.loads(state))

    def begin(self, epoch: int) -> None:
        """Set the number of the next pass."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def read(self) -> Iterator[Any]:
        """Yield the samples of a pass, or the rest of the pass after ``load_state``."""
        yield from self._dataset

    def item(self, index: int, split: Split) -> Any:
        """Return one held-out sample."""
        assert split == "eval"
        return self._held_out[index]


def _held_out(dataset: Any, refusal: Refusal) -> Any:
    """Return the attribute ``held_out`` of a dataset; None if it has none.

    Raises:
        ConfigError: It has no length, or can't be indexed.
    """
    held_out: Any = getattr(dataset, "held_out", None)
    is_dataset = hasattr(held_out, "__getitem__") and hasattr(held_out, "__len__")
    if held_out is not None and not is_dataset:
        kind = type(held_out).__name__
        raise refusal(f"its held_out is {kind}, without __len__ and __getitem__; it needs both")
    return held_out


def _is_stream(dataset: Any) -> bool:
    """Return whether it is torch's ``IterableDataset``, which has a failing ``__getitem__``."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _is_pair(item: Any) -> bool:
    """Return whether an item is a pair of inputs and targets: tensors, arrays or numbers."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return all(hasattr(part, "__array__") or isinstance(part, int | float) for part in item)


def _counted(kind: Kind, inputs: tuple[int, ...], targets: tuple[int, ...]) -> Counted:
    """Return what the targets of samples with these shapes belong to.

    Inputs [C, H, W] are images even if their elements are integers.
    """
    if not targets:
        return "images" if len(inputs) == 3 else "samples"
    return "tokens" if kind == "tokens" and targets == inputs else "targets"


def _is_float(array: npt.NDArray[Any]) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def _num_classes(pairs: Any, configured: int | None, refusal: Refusal) -> int:
    """Return the size of the target space, from the configuration or else from the dataset."""
    if configured is not None:
        return configured
    for name in ("num_classes", "vocab_size"):
        if isinstance(getattr(pairs, name, None), int):
            return int(getattr(pairs, name))
    if hasattr(pairs, "classes"):  # as in torchvision
        return len(pairs.classes)
    raise refusal("the dataset has no attribute num_classes or vocab_size; set data.num_classes")
