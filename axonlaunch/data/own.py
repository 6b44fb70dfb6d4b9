"""A dataset of one's own as torch has them: by index, or a stream; of samples of any structure.

What has the form of ``data.dataset.Dataset`` is taken as it is. A stream's order is its own; which
of its samples a step sees is the loader's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from axonlaunch.data.dataset import Batch, Dataset, Kind, NoText, Split
from axonlaunch.data.samples import Collate, Samples, collating

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
    """Return what somebody's builder made in the form of a dataset.

    Args:
        dataset: What it returned.
        collate: Makes a batch of samples; None: torch's default, and pairs stay pairs.
        eval_fraction: Share of a map-style dataset that is held out where it has no ``held_out``;
            None: 5 %.
        num_classes: Of pairs; None: as the dataset says.
        refusal: Makes the error of a reason.

    Raises:
        ConfigError: It is none, or empty.
    """
    if all(hasattr(dataset, name) for name in _DATASET):
        return cast("Dataset", dataset)
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
        f"__getitem__), nor a stream (__iter__), nor one of ours: it has no {missing}"
    )


class _Divided:
    """A map-style dataset and what is held out: its ``held_out``, or else its last samples."""

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
        """Return what an error calls a sample."""
        if split == "eval" and self._held_out is not None:
            return f"held_out[{index}]"
        return f"sample {index + (self.num_samples if split == 'eval' else 0)}"


class PairsDataset(NoText):
    """A map-style dataset whose items are ``(inputs, targets)``.

    Attributes:
        float_targets: Shape of a sample's targets where they are no classes, but numbers for a
            loss of one's own; None: they are classes.
    """

    def __init__(
        self, pairs: Any, num_classes: int | None, eval_fraction: float, refusal: Refusal
    ) -> None:
        """Look at the first item.

        Raises:
            ConfigError: The number of classes is not known, or ``held_out`` is no dataset.
        """
        self._pairs, self._refusal = _Divided(pairs, eval_fraction, refusal), refusal
        inputs, targets = (np.asarray(part) for part in pairs[0])
        self.float_targets = targets.shape if _is_float(targets) else None
        self.kind: Kind = "tokens" if np.issubdtype(inputs.dtype, np.integer) else "images"
        self.sample_shape = inputs.shape
        is_known = self.float_targets is not None
        self.num_classes = 0 if is_known else _num_classes(pairs, num_classes, refusal)
        self.num_eval_samples = self._pairs.num_eval_samples
        self.num_samples = self._pairs.num_samples

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the samples of these indices, in their order.

        Raises:
            ConfigError: Their shapes differ, or a target is no class where others are.
        """
        pairs = [self._pairs.item(int(index), split) for index in indices]
        names = [self._pairs.name(int(index), split) for index in indices]
        dtype = np.int64 if self.kind == "tokens" else np.float32
        inputs = [np.asarray(pair[0], dtype=dtype) for pair in pairs]
        targets = [np.asarray(pair[1]) for pair in pairs]
        for what, arrays in (("inputs", inputs), ("targets", targets)):
            self._check_shapes(what, arrays, names)
        return Batch.from_numpy(np.stack(inputs), self._of_one_type(targets, names))

    def _of_one_type(self, targets: list[npt.NDArray[Any]], names: list[str]) -> npt.NDArray[Any]:
        if self.float_targets is not None:
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
                    "them, or make batches by a function of your own, data.collate"
                )


class _OwnSamples(NoText):
    """Samples of any structure."""

    kind: Kind = "structured"
    num_classes = 0
    sample_shape: tuple[int, ...] = ()

    def __init__(self, collate: Collate | None) -> None:
        """Choose what makes a batch of them."""
        self.collate = collating(collate)

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Samples:
        """Return the samples of these indices, in their order."""
        return Samples([self.item(int(index), split) for index in indices], self.collate)

    def item(self, index: int, split: Split) -> Any:
        """Return one sample."""
        raise NotImplementedError


class IndexedSamples(_OwnSamples):
    """A map-style dataset; its last samples are held out where it has no ``held_out``."""

    def __init__(
        self, dataset: Any, collate: Collate | None, eval_fraction: float, refusal: Refusal
    ) -> None:
        """Divide it.

        Raises:
            ConfigError: ``held_out`` is no dataset.
        """
        super().__init__(collate)
        self._divided = _Divided(dataset, eval_fraction, refusal)
        self.num_eval_samples = self._divided.num_eval_samples
        self.num_samples = self._divided.num_samples

    def item(self, index: int, split: Split) -> Any:
        """Return one sample."""
        return self._divided.item(index, split)


class StreamedSamples(_OwnSamples):
    """An iterable dataset, read from one end to the other, again and again.

    Attributes:
        num_samples: Of a pass, as its ``__len__`` says; 0: it does not say.
        has_state: Whether it says where it is, so that a resumed run need not read what was read.
    """

    def __init__(self, dataset: Any, collate: Collate | None, refusal: Refusal) -> None:
        """Look at what it offers.

        Raises:
            ConfigError: It has half of what a state takes, its state is nothing JSON can hold, or
                ``held_out`` is no dataset.
        """
        super().__init__(collate)
        self._dataset, self._held_out = dataset, _held_out(dataset, refusal)
        self.num_eval_samples = 0 if self._held_out is None else len(self._held_out)
        try:
            self.num_samples = len(dataset)
        except (TypeError, NotImplementedError):
            self.num_samples = 0
        self.is_unsized = not self.num_samples
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
    def notes(self) -> tuple[str, ...]:
        """What a run says of the data when it starts."""
        if self.has_state:
            return ()
        return ("data: a stream without state_dict; a resumed run reads what was read again",)

    def state(self) -> str:
        """Return where it is, as JSON."""
        return json.dumps(self._dataset.state_dict(), allow_nan=False)

    def load_state(self, state: str) -> None:
        """Put it where it was."""
        self._dataset.load_state_dict(json.loads(state))

    def begin(self, epoch: int) -> None:
        """Say which pass the next one is."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def read(self) -> Iterator[Any]:
        """Yield the samples of a pass, or of a state that was loaded those that are left of it."""
        yield from self._dataset

    def item(self, index: int, split: Split) -> Any:
        """Return one sample that is held out."""
        assert split == "eval"
        return self._held_out[index]


def _held_out(dataset: Any, refusal: Refusal) -> Any:
    """Return what a dataset has as ``held_out``; None: it has none.

    Raises:
        ConfigError: It has no length, or can't be indexed.
    """
    held_out: Any = getattr(dataset, "held_out", None)
    fits = hasattr(held_out, "__getitem__") and hasattr(held_out, "__len__")
    if held_out is not None and not fits:
        kind = type(held_out).__name__
        raise refusal(f"its held_out is {kind}, without __len__ and __getitem__; it needs both")
    return held_out


def _is_stream(dataset: Any) -> bool:
    """Say whether it is torch's ``IterableDataset``, whose ``__getitem__`` only fails."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _is_pair(item: Any) -> bool:
    """Say whether an item is inputs and targets, each a tensor, an array or a number."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return all(hasattr(part, "__array__") or isinstance(part, int | float) for part in item)


def _is_float(array: npt.NDArray[Any]) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def _num_classes(pairs: Any, asked: int | None, refusal: Refusal) -> int:
    """Return the size of the target space, as given, or as the dataset says it itself."""
    if asked is not None:
        return asked
    for name in ("num_classes", "vocab_size"):
        if isinstance(getattr(pairs, name, None), int):
            return int(getattr(pairs, name))
    if hasattr(pairs, "classes"):  # as torchvision's have
        return len(pairs.classes)
    raise refusal("the dataset has no attribute num_classes or vocab_size; set data.num_classes")
