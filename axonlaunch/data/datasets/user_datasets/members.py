"""Reads the members of a user's dataset; no other module asks whether a dataset has one.

A member is missing if reading it raises ``AttributeError``. Protocols are checked only for special
methods: since Python 3.12, ``isinstance`` does not see the members that a wrapper's ``__getattr__``
passes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sized
from typing import Any, Protocol, TypeVar, runtime_checkable

from axonlaunch.data.datasets.dataset import DatasetInfo

_Value = TypeVar("_Value")


@runtime_checkable
class MapStyle(Protocol):
    """A dataset with samples by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""


class OptionalMembers:
    """What a user's dataset offers beside its samples. A missing member is None or its default.

    A member is read when it is used: some datasets compute theirs from all samples.
    """

    def __init__(self, dataset: Any) -> None:
        """Describe a dataset, whose class need not derive from one of axonlaunch."""
        self._dataset = dataset

    @property
    def held_out(self) -> Any:
        """Held-out samples, a map-style dataset; not checked."""
        return _read(lambda: self._dataset.held_out, default=None)

    @property
    def num_classes(self) -> int | None:
        """Size of the target space.

        It is ``num_classes`` or ``vocab_size``, or the length of ``classes``, as in torchvision.
        """
        for read in (lambda: self._dataset.num_classes, lambda: self._dataset.vocab_size):
            if isinstance(number := _read(read, default=None), int):
                return number
        classes = _read(lambda: self._dataset.classes, default=None)
        return len(classes) if isinstance(classes, Sized) else None

    @property
    def set_epoch(self) -> Callable[[int], object] | None:
        """Sets the number of the next pass over a stream."""
        function: Callable[[int], object] | None = _read(
            lambda: self._dataset.set_epoch, default=None
        )
        return function

    @property
    def state_dict(self) -> Callable[[], Any] | None:
        """Returns the position of a stream."""
        function: Callable[[], Any] | None = _read(lambda: self._dataset.state_dict, default=None)
        return function

    @property
    def load_state_dict(self) -> Callable[[Any], object] | None:
        """Returns to a position of a stream."""
        function: Callable[[Any], object] | None = _read(
            lambda: self._dataset.load_state_dict, default=None
        )
        return function

    @property
    def info(self) -> DatasetInfo:
        """Optional facts of a dataset that returns whole batches."""
        return _read(lambda: self._dataset.info, default=DatasetInfo())

    @property
    def is_text(self) -> bool:
        """Whether ``encode`` and ``decode`` are supported."""
        return _read(lambda: self._dataset.is_text, default=False)


def missing_members(dataset: Any) -> list[str]:
    """Return the required members of ``Dataset`` that an object does not have.

    ``num_classes`` is read only if nothing else is missing, because some datasets of single samples
    compute it from all of them.
    """
    required: tuple[Callable[[], Any], ...] = (
        lambda: dataset.kind,
        lambda: dataset.num_samples,
        lambda: dataset.num_eval_samples,
        lambda: dataset.sample_shape,
        lambda: dataset.samples,
    )
    if not (missing := _missing(required)):
        return _missing([lambda: dataset.num_classes])
    has_classes = inspect.getattr_static(dataset, "num_classes", None) is not None
    return missing if has_classes else [*missing, "num_classes"]


def _missing(required: Iterable[Callable[[], Any]]) -> list[str]:
    missing = []
    for read in required:
        try:
            read()
        except AttributeError as error:
            missing.append(error.name or str(error))
    return missing


def _read(read: Callable[[], _Value], *, default: _Value) -> _Value:
    try:
        return read()
    except AttributeError:
        return default
