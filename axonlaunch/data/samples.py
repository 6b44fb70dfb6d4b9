"""Samples of any structure, and the batches that a collate function makes of them.

A batch is made of the samples of one micro-batch, so that its tensors may have any shape; how a
micro-batch is chosen, and what a loss makes of it, is others' business.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class CollatedSamples:
    """What a collate function made of a micro-batch's samples.

    Attributes:
        whole: Any nesting of dicts, tuples and lists of tensors; what is no tensor stays as it is.
        num_samples: How many they were.
        is_counted: Whether its loss counts: at the end of an evaluation some ranks have nothing
            left, and compute once more what others have counted.
    """

    whole: Any
    num_samples: int
    is_counted: bool = True

    def map(self, function: Callable[[Tensor], Tensor]) -> CollatedSamples:
        """Return the same of what a function makes of each tensor."""
        return replace(self, whole=map_tensors(function, self.whole))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        return sum(leaf.nbytes for leaf in tree_leaves(self.whole) if isinstance(leaf, Tensor))

    def forward_arguments(self, forward: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what a forward is called with: of a dict what it has a name for.

        Of a tuple or a list it is the first element, of anything else all of it.
        """
        if isinstance(self.whole, Mapping):
            return [], {name: self.whole[name] for name in taken_names(forward, self.whole)}
        return [self.whole[0] if isinstance(self.whole, tuple | list) else self.whole], {}


@dataclass(frozen=True)
class Samples:
    """Samples side by side, as a dataset of one's own gives them.

    Attributes:
        items: The samples.
        collate: Makes a batch of some of them.
        counted: Whether each counts; None: all do.
        parts: What was made of micro-batches already.
    """

    items: Sequence[Any]
    collate: Collate
    counted: Sequence[bool] | None = None
    parts: tuple[CollatedSamples, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, start: int, stop: int) -> Samples:
        """Return some of the samples."""
        counted = None if self.counted is None else self.counted[start:stop]
        return Samples(self.items[start:stop], self.collate, counted)

    def micro_batches(self, size: int) -> Iterator[CollatedSamples]:
        """Yield what a model is given, of so many samples at a time."""
        if self.parts:
            yield from self.parts
            return
        for start in range(0, len(self), size):
            part = self.rows(start, start + size)
            # Every rank does as many forwards, also where nothing is left that counts.
            counted = [*itertools.compress(part.items, part.counted or [True] * len(part))]
            items = counted or list(part.items)
            yield CollatedSamples(self.collate(items), len(items), is_counted=bool(counted))

    def ready(self, size: int) -> Samples:
        """Return the same with its micro-batches made."""
        return replace(self, parts=tuple(self.micro_batches(size)))

    def uncounted(self, first: int, *, marks_targets: bool) -> Samples:
        """Return the same with nothing to count from a sample on; nobody knows its targets."""
        del marks_targets
        return self.counting(place < first for place in range(len(self)))

    def counting(self, counted: Iterable[bool]) -> Samples:
        """Return the same, of which those count that do now and are said to."""
        before = self.counted or [True] * len(self)
        both = [was and stays for was, stays in zip(before, counted, strict=True)]
        return replace(self, counted=both, parts=())

    def pin_memory(self) -> Samples:
        """Copy what was made to page-locked memory."""
        pinned = tuple(part.map(lambda tensor: tensor.pin_memory()) for part in self.parts)
        return replace(self, parts=pinned)


def map_tensors(function: Callable[[Tensor], Tensor], whole: Any) -> Any:
    """Return a nesting of what a function makes of each tensor in it."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, function, whole)


def taken_names(forward: Callable[..., Any], batch: Mapping[str, Any]) -> list[str]:
    """Return which of a batch's names a forward has parameters of; ``**others`` takes none."""
    return [name for name in inspect.signature(forward).parameters if name in batch]


def default_collate(items: list[Any]) -> Any:
    """Stack tensors and numbers inside of dicts, tuples and lists, as a DataLoader does."""
    from torch.utils.data import default_collate as collate

    return collate(items)


def collating(collate: Collate | None) -> Collate:
    """Return what makes batches; None: ``default_collate``."""
    return collate or partial(default_collate)
