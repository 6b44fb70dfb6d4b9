"""Samples of any structure, and the batches that a collate function creates from them.

The samples of one micro-batch are collated together, so tensors may have any shape. The loader
selects micro-batches, and a loss interprets them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from axonlaunch.data.reading.random_numbers import kept_generators, seed_generators
from axonlaunch.data.reading.sample_error import naming

if TYPE_CHECKING:
    from torch import Tensor, nn

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class SampleOrigin:
    """The source of a sample.

    Attributes:
        dataset: Description of the dataset, such as "data=custom (my_data:Images)".
        name: Name of the sample in the dataset, such as "sample 17".
        seed: Seed of its random numbers, see ``data.reading.random_numbers``.
    """

    dataset: str
    name: str
    seed: int


@dataclass(frozen=True)
class CollatedSamples:
    """Result of a collate function for one micro-batch.

    Attributes:
        full: Any nesting of dicts, tuples and lists of tensors; other objects are not changed.
        num_samples: Number of samples.
        is_counted: Whether its loss counts. At the end of an evaluation, ranks without samples left
            repeat a batch that does not count.
    """

    full: Any
    num_samples: int
    is_counted: bool = True

    def map(self, function: Callable[[Tensor], Tensor]) -> CollatedSamples:
        """Return a copy with a function applied to each tensor."""
        return replace(self, full=map_tensors(function, self.full))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        return sum(leaf.nbytes for leaf in tree_leaves(self.full) if isinstance(leaf, Tensor))

    def forward_arguments(self, module: nn.Module) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a forward.

        A dict passes the entries that the forward has parameters for. A tuple or list passes its
        first element, any other batch itself.
        """
        if isinstance(self.full, Mapping):
            return [], {name: self.full[name] for name in taken_names(module.forward, self.full)}
        return [self.full[0] if isinstance(self.full, tuple | list) else self.full], {}


@dataclass(frozen=True)
class Samples:
    """Samples of a user's dataset.

    Attributes:
        items: Samples as the dataset returned them.
        collate: Combines some of them to a batch.
        counted: Whether each sample counts; None: all do.
        parts: Micro-batches that are already collated.
        origins: Origin of each sample; empty: unknown.
    """

    items: Sequence[Any]
    collate: Collate
    counted: Sequence[bool] | None = None
    parts: tuple[CollatedSamples, ...] = ()
    origins: Sequence[SampleOrigin] = ()

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, start: int, stop: int) -> Samples:
        """Return some of the samples."""
        counted = None if self.counted is None else self.counted[start:stop]
        origins = self.origins[start:stop]
        return Samples(self.items[start:stop], self.collate, counted, origins=origins)

    def combine(self, items: list[Any], *, start: int, stop: int) -> Any:
        """Collate the items of a micro-batch.

        Random numbers of the collate function are seeded by the first sample of the micro-batch,
        so they don't depend on the process that collates.

        Args:
            items: The items, without those that do not count.
            start: Position of the first sample of the micro-batch.
            stop: Position after its last sample.
        """
        origins = self.origins[start:stop]
        if not origins:
            return self.collate(items)
        names = [origin.name for origin in origins]
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        with kept_generators(), naming(f"{origins[0].dataset}: collating {what}"):
            # Not the seed itself, because the first sample has used its random numbers.
            seed_generators(origins[0].seed ^ 1)
            return self.collate(items)

    def micro_batches(self, size: int) -> Iterator[CollatedSamples]:
        """Yield collated micro-batches of ``size`` samples."""
        if self.parts:
            yield from self.parts
            return
        for start in range(0, len(self), size):
            part = self.rows(start, start + size)
            # Every rank runs the same number of forwards, even if no samples count.
            counted = [*itertools.compress(part.items, part.counted or [True] * len(part))]
            items = counted or list(part.items)
            collated = self.combine(items, start=start, stop=start + size)
            yield CollatedSamples(collated, len(items), is_counted=bool(counted))

    def ready(self, size: int) -> Samples:
        """Return a copy with collated micro-batches."""
        return replace(self, parts=tuple(self.micro_batches(size)))

    def uncounted(self, first: int, *, marks_targets: bool) -> Samples:
        """Return a copy in which the samples from ``first`` on do not count."""
        del marks_targets
        return self.counting(number < first for number in range(len(self)))

    def counting(self, counted: Iterable[bool]) -> Samples:
        """Return a copy in which fewer samples count: those that counted and are still selected."""
        previous = self.counted or [True] * len(self)
        both = [was and stays for was, stays in zip(previous, counted, strict=True)]
        return replace(self, counted=both, parts=())

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """Return one batch of the samples of several, in this order."""
        return cls(
            [item for part in parts for item in part.items],
            parts[0].collate,
            parts=tuple(collated for part in parts for collated in part.parts),
            origins=[origin for part in parts for origin in part.origins],
        )

    def pin_memory(self) -> Samples:
        """Copy collated micro-batches to page-locked memory."""
        pinned = tuple(part.map(lambda tensor: tensor.pin_memory()) for part in self.parts)
        return replace(self, parts=pinned)


def map_tensors(function: Callable[[Tensor], Tensor], full: Any) -> Any:
    """Return a nesting with a function applied to each tensor in it."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, function, full)


def taken_names(forward: Callable[..., Any], batch: Mapping[str, Any]) -> list[str]:
    """Return the names in a batch that are named parameters of a forward.

    Names that only ``**kwargs`` would take are not returned.
    """
    return [name for name in inspect.signature(forward).parameters if name in batch]


def default_collate(items: list[Any]) -> Any:
    """Stack tensors and numbers inside dicts, tuples and lists, as a DataLoader does."""
    from torch.utils.data import default_collate as collate

    return collate(items)


def collating(collate: Collate | None) -> Collate:
    """Return the collate function; None: ``default_collate``."""
    return collate or partial(default_collate)
