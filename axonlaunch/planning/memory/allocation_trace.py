"""Writes down every storage that comes, changes its size or goes, in order and by stream.

It is what an allocator would be asked; what the allocator makes of it is ``caching_allocator``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from axonlaunch.engines.base import Engine
from axonlaunch.engines.optimizer.clipping import local_part
from axonlaunch.planning.memory.caching_allocator import Change
from axonlaunch.planning.tracing.storage_trace import Category, StorageTrace

_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default

BlockPlace: TypeAlias = tuple[int, int]
"""Where a block is: its pipeline stage, and its index there."""


@dataclass(frozen=True)
class Recording:
    """What a rank asked of its allocator, from nothing to the end of the last step.

    Attributes:
        changes: In order.
        visits: ``(index of the first change, block)`` whenever another block, or none of them,
            begins to work; ascending.
        owners: The blocks of storages that are made outside of any block's work.
        exchanged: Bytes of the largest part of a tensor that ranks sum and divide in a block.
    """

    changes: list[Change]
    visits: list[tuple[int, BlockPlace | None]]
    owners: dict[int, BlockPlace]
    exchanged: int = 0


class RecordingTrace(StorageTrace):
    """A trace that remembers when each storage of the device came and went.

    torch's stand-ins for streams on a CPU say which one would be current: fully_shard gathers and
    reduces on streams of its own.
    """

    def __init__(self, **options: Any) -> None:
        """Begin to record; arguments as ``StorageTrace``'s."""
        super().__init__(**options)
        self._changes: list[Change] = []
        self._visits: list[tuple[int, BlockPlace | None]] = [(0, None)]
        self._numbers: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._kept_streams: list[Any] = []  # so that no id is used again
        self._first_update: tuple[int, int] | None = None
        self._exchanged = 0

    def recording(
        self, engine: Engine | None = None, blocks: Mapping[int, Sequence[nn.Module]] | None = None
    ) -> Recording:
        """Return what was recorded, but for what lived inside of the first update alone.

        There DTensor works out how results are laid out by running operations on tensors as large
        as the whole model, which a run does without storage.

        Args:
            engine: Whose parameters and states are recognised by their blocks.
            blocks: Of each pipeline stage, in order.
        """
        self._remove_freed()
        owners = {} if engine is None else self._owners(engine, blocks or {})
        start, stop = self._first_update or (0, 0)
        known = {change.storage for change in self._changes[:start]}
        gone = {change.storage for change in self._changes[start:stop] if not change.num_bytes}
        passing = gone - known
        changes = [change for change in self._changes if change.storage not in passing]
        before = [0]
        for change in self._changes:
            before.append(before[-1] + (change.storage not in passing))
        visits = [(before[at], place) for at, place in self._visits]
        return Recording(changes, visits, owners, self._exchanged)

    def begin(self, *name: str | int) -> None:
        """Begin an event, which ends the one before."""
        super().begin(*name)
        where = name[1:3]
        place = (int(where[0]), int(where[1])) if len(where) == 2 else None
        if place != self._visits[-1][1]:
            self._visits.append((len(self._changes), place))

    @contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Take whatever is allocated inside for one category."""
        self._remove_freed()
        start = len(self._changes)
        with super().during(category):
            yield
        self._remove_freed()
        if category == "temporary" and self._first_update is None:
            self._first_update = start, len(self._changes)

    def note_size(self, storage: Any) -> None:
        """Note that a storage has another size."""
        super().note_size(storage)
        number = self._numbers.get(id(storage))
        if number is not None:
            self._changes.append(Change(number, storage.nbytes(), self._stream()))

    def _add(self, tensor: Tensor, category: Category) -> None:
        self._remove_freed()
        storage = tensor.untyped_storage()
        key = id(storage)
        known = key in self._live
        super()._add(tensor, category)
        if known or key not in self._live or category in self._host:
            return
        self._numbers[key] = len(self._changes)
        self._changes.append(Change(self._numbers[key], storage.nbytes(), self._stream()))

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._without_values(func, args, kwargs)
        if func is _REDUCE_SCATTER and self._visits[-1][1] is not None:
            self._exchanged = max(self._exchanged, out.nbytes)
        return out

    def _move(self, storage: Any, category: Category) -> None:
        super()._move(storage, category)
        if category in self._host:
            number = self._numbers.pop(id(storage.alive()), None)
            if number is not None:
                self._changes.append(Change(number, 0))

    def _remove(self, key: int) -> None:
        super()._remove(key)
        number = self._numbers.pop(key, None)
        if number is not None:
            self._changes.append(Change(number, 0))

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()
        number = self._streams.get(id(stream))
        if number is None:
            number = self._streams[id(stream)] = len(self._streams)
            self._kept_streams.append(stream)
        return number

    def _owners(
        self, engine: Engine, blocks: Mapping[int, Sequence[nn.Module]]
    ) -> dict[int, BlockPlace]:
        of_parameter = {
            id(parameter): (stage, index)
            for stage, members in blocks.items()
            for index, block in enumerate(members)
            for parameter in block.parameters()
        }
        owners = {}
        of_name = {}
        for name, parameter in engine.named_parameters():
            if place := of_parameter.get(id(parameter)):
                of_name[name] = place
                owners[self._number(parameter)] = place
        for key, state in engine.state_dict()["optimizer"].items():
            if place := of_name.get(key.rpartition(".")[0]):
                owners[self._number(state)] = place
        owners.pop(None, None)
        return owners  # type: ignore[return-value]

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(id(local_part(tensor.detach()).untyped_storage()))
