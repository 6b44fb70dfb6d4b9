"""Reads the members of a user's dataset; no other module asks whether a dataset has one.

A member is missing if reading it raises ``AttributeError``. Protocols are checked only for special
methods: since Python 3.12, ``isinstance`` does not see the members that a wrapper's ``__getattr__``
passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from axonlaunch.data.datasets.dataset import DatasetInfo

_Value = TypeVar("_Value")


@runtime_checkable
class MapStyle(Protocol):
    """A dataset with samples by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""


@dataclass(frozen=True, kw_only=True)
class OptionalMembers:
    """What a user's dataset offers beside its samples. A missing member is None or its default.

    Attributes:
        held_out: Held-out samples, a map-style dataset; not checked.
        num_classes: Size of the target space: ``num_classes`` or ``vocab_size``, or the length of
            ``classes``, as in torchvision.
        set_epoch: Sets the number of the next pass over a stream.
        state_dict: Returns the position of a stream.
        load_state_dict: Returns to a position of a stream.
        info: Optional facts of a dataset that returns whole batches.
        is_text: Whether ``encode`` and ``decode`` are supported.
    """

    held_out: Any
    num_classes: int | None
    set_epoch: Callable[[int], object] | None
    state_dict: Callable[[], Any] | None
    load_state_dict: Callable[[Any], object] | None
    info: DatasetInfo
    is_text: bool

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """Read the members of a dataset, whose class need not derive from one of axonlaunch."""
        return cls(
            held_out=_read(lambda: dataset.held_out, default=None),
            num_classes=_num_classes(dataset),
            set_epoch=_read(lambda: dataset.set_epoch, default=None),
            state_dict=_read(lambda: dataset.state_dict, default=None),
            load_state_dict=_read(lambda: dataset.load_state_dict, default=None),
            info=_read(lambda: dataset.info, default=DatasetInfo()),
            is_text=_read(lambda: dataset.is_text, default=False),
        )


def missing_members(dataset: Any) -> list[str]:
    """Return the required members of ``Dataset`` that an object does not have."""
    required: tuple[Callable[[], Any], ...] = (
        lambda: dataset.kind,
        lambda: dataset.num_samples,
        lambda: dataset.num_eval_samples,
        lambda: dataset.num_classes,
        lambda: dataset.sample_shape,
        lambda: dataset.samples,
    )
    missing = []
    for read in required:
        try:
            read()
        except AttributeError as error:
            missing.append(error.name or str(error))
    return missing


def _num_classes(dataset: Any) -> int | None:
    for read in (lambda: dataset.num_classes, lambda: dataset.vocab_size):
        if isinstance(number := _read(read, default=None), int):
            return number
    classes = _read(lambda: dataset.classes, default=None)
    return len(classes) if isinstance(classes, Sized) else None


def _read(read: Callable[[], _Value], *, default: _Value) -> _Value:
    try:
        return read()
    except AttributeError:
        return default
