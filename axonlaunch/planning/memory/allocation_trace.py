"""Records every allocation, resize and release of a storage, in order and with its stream.

The recording contains the requests to an allocator. ``caching_allocator`` replays them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from axonlaunch.comm.mesh import local_part
from axonlaunch.engines.engine import Engine
from axonlaunch.planning.memory.caching_allocator import Change
from axonlaunch.planning.tracing.storage_trace import Category, StorageTrace

_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default

BlockPosition: TypeAlias = tuple[int, int]
"""Position of a block: its pipeline stage and its index in that stage.

A chunk of a loss is recorded like a block of the stage ``LOSS``.
"""

LOSS = -1
"""Number that stands for the loss in place of a pipeline stage."""


@dataclass(frozen=True)
class Recording:
    """A rank's requests to its allocator, from an empty device to the end of the last step.

    Attributes:
        changes: Changes of storages, in order.
        visits: ``(index of the first change, block)`` for each time that the running block
            changes, in order. The block is None outside all blocks.
        owners: Blocks of storages that are allocated outside all blocks, by storage.
        max_reduced_bytes: Size of the largest result of a reduce-scatter inside a block, in bytes.
    """

    changes: list[Change]
    visits: list[tuple[int, BlockPosition | None]]
    owners: dict[int, BlockPosition]
    max_reduced_bytes: int = 0


class RecordingTrace(StorageTrace):
    """A trace that records the allocation and release of each device storage.

    ``fully_shard`` gathers and reduces on separate streams. On a CPU, torch's placeholder streams
    show which stream would be current.
    """

    def __init__(self, **options: Any) -> None:
        """Begin to record; takes the arguments of ``StorageTrace``."""
        super().__init__(**options)
        self._changes: list[Change] = []
        self._visits: list[tuple[int, BlockPosition | None]] = [(0, None)]
        self._before_loss: BlockPosition | None = None
        self._storage_ids: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._kept_streams: list[Any] = []  # so that no id is reused
        self._first_update: tuple[int, int] | None = None
        self._max_reduced_bytes = 0

    @property
    def position(self) -> BlockPosition | None:
        """The running block or chunk; None outside all of them."""
        return self._visits[-1][1]

    def recording(
        self, engine: Engine | None = None, blocks: Mapping[int, Sequence[nn.Module]] | None = None
    ) -> Recording:
        """Return the recording, without storages that lived only during the first update.

        In the first update DTensor determines the layout of results by running operations on
        tensors of the size of the full model. In a real run these tensors have no storage.

        Args:
            engine: Engine whose parameters and optimizer states are assigned to their blocks, with
                the buffers and other tensors of their modules.
            blocks: Blocks of each pipeline stage, in order.
        """
        self._remove_freed()
        owners = {} if engine is None else self._owners(engine, blocks or {})
        start, stop = self._first_update or (0, 0)
        allocated_before = {change.storage for change in self._changes[:start]}
        freed_inside = {
            change.storage for change in self._changes[start:stop] if not change.num_bytes
        }
        temporary = freed_inside - allocated_before
        changes = [change for change in self._changes if change.storage not in temporary]
        kept_before = [0]
        for change in self._changes:
            kept_before.append(kept_before[-1] + (change.storage not in temporary))
        visits = [(kept_before[index], position) for index, position in self._visits]
        return Recording(changes, visits, owners, self._max_reduced_bytes)

    def begin(self, *name: str | int) -> None:
        """End the current event and begin a new one."""
        super().begin(*name)
        coordinates = name[1:3]
        self.visit((int(coordinates[0]), int(coordinates[1])) if len(coordinates) == 2 else None)

    def visit(self, position: BlockPosition | None) -> None:
        """Record that a block or chunk begins to run, or with None that the last one has ended."""
        self._remove_freed()
        if position != self.position:
            self._visits.append((len(self._changes), position))

    def visit_chunk(self, index: int | None) -> None:
        """Record that a chunk of a loss begins to run, or with None that the last one has ended.

        What runs after the last one continues the work that the chunks have interrupted.
        """
        if index is None:
            self.visit(self._before_loss)
            return
        if self.position is None or self.position[0] != LOSS:
            self._before_loss = self.position
        self.visit((LOSS, index))

    @contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Count all storages allocated inside the context in one category."""
        self._remove_freed()
        start = len(self._changes)
        with super().during(category):
            yield
        self._remove_freed()
        if category == "temporary" and self._first_update is None:
            self._first_update = start, len(self._changes)

    def note_size(self, storage: Any) -> None:
        """Record the new size of a storage."""
        super().note_size(storage)
        storage_id = self._storage_ids.get(id(storage))
        if storage_id is not None:
            self._changes.append(Change(storage_id, storage.nbytes(), self._stream()))

    def _add(self, tensor: Tensor, category: Category) -> None:
        self._remove_freed()
        storage = tensor.untyped_storage()
        key = id(storage)
        was_live = key in self._live
        super()._add(tensor, category)
        if was_live or key not in self._live or category in self._host:
            return
        self._storage_ids[key] = len(self._changes)
        self._changes.append(Change(self._storage_ids[key], storage.nbytes(), self._stream()))

    def _run_fake_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._run_fake_collective(func, args, kwargs)
        if func is _REDUCE_SCATTER and self.position is not None:
            self._max_reduced_bytes = max(self._max_reduced_bytes, out.nbytes)
        return out

    def _recategorize(self, storage: Any, category: Category) -> None:
        super()._recategorize(storage, category)
        if category in self._host:
            storage_id = self._storage_ids.pop(id(storage.reference()), None)
            if storage_id is not None:
                self._changes.append(Change(storage_id, 0))

    def _remove(self, key: int) -> None:
        super()._remove(key)
        storage_id = self._storage_ids.pop(key, None)
        if storage_id is not None:
            self._changes.append(Change(storage_id, 0))

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()
        number = self._streams.get(id(stream))
        if number is None:
            number = self._streams[id(stream)] = len(self._streams)
            self._kept_streams.append(stream)
        return number

    def _owners(
        self, engine: Engine, blocks: Mapping[int, Sequence[nn.Module]]
    ) -> dict[int, BlockPosition]:
        position_by_id = {
            id(parameter): (stage, index)
            for stage, members in blocks.items()
            for index, block in enumerate(members)
            for parameter in block.parameters()
        }
        owners = {
            self._storage_id(tensor): (stage, index)
            for stage, members in blocks.items()
            for index, block in enumerate(members)
            for module in block.modules()
            for tensor in (*module._buffers.values(), *vars(module).values())
            if isinstance(tensor, Tensor)
        }
        position_by_name = {}
        for name, parameter in engine.named_parameters():
            if position := position_by_id.get(id(parameter)):
                position_by_name[name] = position
                owners[self._storage_id(parameter)] = position
        for key, state in engine.state_dict()["optimizer"].items():
            if position := position_by_name.get(key.rpartition(".")[0]):
                owners[self._storage_id(state)] = position
        owners.pop(None, None)
        return owners  # type: ignore[return-value]

    def _storage_id(self, tensor: Tensor) -> int | None:
        return self._storage_ids.get(id(local_part(tensor.detach()).untyped_storage()))
