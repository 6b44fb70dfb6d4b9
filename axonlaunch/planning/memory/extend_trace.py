"""Extends the allocation trace of a shallow model to a deeper one by repeating its middle block.

The middle chunk of a loss that was recorded with few chunks is repeated in the same way.

Every block allocates and frees its storages a fixed number of blocks before or after it runs. A
repeated block therefore gets copies of the middle block's storages, shifted by the same distance.
Traces that visit blocks in any order but ascending or descending raise ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from axonlaunch.planning.memory.allocation_trace import BlockPosition, Recording
from axonlaunch.planning.memory.caching_allocator import Change

_REACH = 2
"""Distance in blocks within which the changes of a storage move along with its block.

A storage that changes farther away is held until an end of the model.
"""
FEWEST = 2 * (_REACH + 1) + 1
"""Minimum number of blocks per stage: a middle block with ``_REACH + 1`` blocks on either side."""


@dataclass(frozen=True)
class BlockPass:
    """The work of one block in a pass through its stage, or work between blocks.

    Attributes:
        block: Position of the block; None between blocks.
        pass_number: Number of the ascending or descending pass through a stage, from 1.
        changes: Changes of storages during this work, in order.
    """

    block: BlockPosition | None
    pass_number: int
    changes: list[Change]


@dataclass(frozen=True)
class Shortened:
    """A stage of which a recording lacks equal blocks, or a loss of which it lacks chunks.

    Attributes:
        missing: Number of blocks to add.
        recorded: Number of recorded blocks, of which at least ``FEWEST`` are equal.
        leading: Number of blocks before the equal ones.
    """

    missing: int
    recorded: int
    leading: int = 0

    @property
    def middle(self) -> int:
        """Index of the recorded block that is repeated."""
        return self.leading + (self.recorded - self.leading) // 2


def extended(recording: Recording, stages: Mapping[int, Shortened]) -> list[Change]:
    """Return the changes of a model with more blocks, and of a loss with more chunks.

    Args:
        recording: Recording of a shallow model.
        stages: Missing blocks by pipeline stage, and missing chunks of the loss by ``LOSS``.

    Raises:
        ValueError: The recording visits blocks in an order that cannot be extended.
    """
    return list(TraceExtender(recording, stages).changes())


class TraceExtender:
    """Inserts further blocks in the middle of the recording of a shallow model.

    The work of the middle block is repeated. Each storage belongs to one block, its home. With the
    middle block 1 of 0 1 2 and two more blocks:

        forward    0 1 2    becomes    0 1 2 3 4
        backward   2 1 0    becomes    4 3 2 1 0

    A storage of block 0 appears once, unchanged. A storage of block 2 appears once and belongs to
    the new block 4. An activation of block 1 appears three times, allocated and freed by blocks 1,
    2 and 3. Changes by other blocks are shifted as well: if block 2 frees the output of block 1,
    blocks 2, 3 and 4 free the outputs of blocks 1, 2 and 3.
    """

    def __init__(self, recording: Recording, stages: Mapping[int, Shortened]) -> None:
        self._num_added = {number: stage.missing for number, stage in stages.items()}
        self._middle = {number: stage.middle for number, stage in stages.items()}
        self._passes = list(_block_passes(recording))
        self._home_block = dict(recording.owners)
        for block_pass in self._passes:
            if block_pass.block is not None:
                for change in block_pass.changes:
                    self._home_block.setdefault(change.storage, block_pass.block)
        self._numbers: dict[tuple[int, int], int] = {}

    def changes(self) -> Iterator[Change]:
        """Yield every allocation and release of the deeper model, in order."""
        # Keys are (pass number, block), or (index, None) for work between blocks.
        slots: dict[tuple[int, BlockPosition | None], list[tuple[int, Change]]] = {}
        for number, block_pass in enumerate(self._passes):
            for block in self._blocks_for(number):
                slots[number if block is None else block_pass.pass_number, block] = []
        for number, block_pass in enumerate(self._passes):
            for position, change in enumerate(block_pass.changes):
                for shift in self._shifts(change.storage):
                    key: tuple[int, BlockPosition | None] = (number, None)
                    if block_pass.block is not None:
                        key = (
                            block_pass.pass_number,
                            self._shifted_block(block_pass.block, change.storage, shift),
                        )
                    if key not in slots:
                        raise ValueError(
                            f"block {key[1]} does not run where a copied storage changes"
                        )
                    slots[key].append((position, self._copy(change, shift)))
        for positioned in slots.values():
            # The order within the work of a block is that of the shallow model.
            yield from (change for _, change in sorted(positioned, key=lambda item: item[0]))

    def _blocks_for(self, number: int) -> list[BlockPosition | None]:
        """Return the blocks of the deeper model, in order, that replace one block's work."""
        block = self._passes[number].block
        if block is None:
            return [None]
        stage, index = block
        middle, num_added = self._middle[stage], self._num_added[stage]
        if index != middle:
            return [(stage, index if index < middle else index + num_added)]
        copies: list[BlockPosition | None] = [(stage, index + n) for n in range(num_added + 1)]
        return copies if self._is_ascending(number) else copies[::-1]

    def _is_ascending(self, number: int) -> bool:
        """Return whether a pass visits blocks in ascending order, from its previous or next block.

        Args:
            number: Index of a block's pass in the trace.
        """
        block_pass = self._passes[number]
        assert block_pass.block is not None
        for neighbor_index in (number - 1, number + 1):
            if not 0 <= neighbor_index < len(self._passes):
                continue
            neighbor = self._passes[neighbor_index]
            if neighbor.pass_number == block_pass.pass_number and neighbor.block is not None:
                return (neighbor.block[1] < block_pass.block[1]) == (neighbor_index < number)
        return True

    def _shifts(self, storage: int) -> range:
        """Return the shift, in blocks, of each copy of a storage."""
        home_block = self._home_block.get(storage)
        if home_block is None:
            return range(1)
        stage, index = home_block
        middle, num_added = self._middle[stage], self._num_added[stage]
        if index < middle:
            return range(1)
        return range(num_added, num_added + 1) if index > middle else range(num_added + 1)

    def _shifted_block(self, block: BlockPosition, storage: int, shift: int) -> BlockPosition:
        """Return the block of the deeper model that makes this change to a shifted copy."""
        stage, index = block
        home_block = self._home_block[storage]
        if home_block[0] == stage and abs(index - home_block[1]) <= _REACH:
            return stage, index + shift
        return stage, index if index <= self._middle[stage] else index + self._num_added[stage]

    def _copy(self, change: Change, shift: int) -> Change:
        storage = self._numbers.setdefault((change.storage, shift), len(self._numbers))
        return Change(storage, change.num_bytes, change.stream)


def _block_passes(recording: Recording) -> Iterator[BlockPass]:
    """Yield the work of each block; all blocks of one pass through a stage share a pass number."""
    starts = [start for start, _ in recording.visits]
    pass_number, previous, step = 0, None, 0
    for (start, block), stop in zip(
        recording.visits, [*starts[1:], len(recording.changes)], strict=True
    ):
        if block is None or previous is None or block[0] != previous[0]:
            pass_number, step = pass_number + 1, 0
        else:
            move = block[1] - previous[1]
            if abs(move) != 1 or (step and move != step):
                pass_number, step = pass_number + 1, 0
            else:
                step = move
        previous = block
        yield BlockPass(block, pass_number, recording.changes[start:stop])
