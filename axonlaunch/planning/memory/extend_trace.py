"""Makes of a shallow model's recording what a deeper one's would be: its middle blocks, repeated.

A block's storages come and go a fixed number of blocks from where they belong, so each of them is
repeated with its block, moved along. What passes through blocks in another order than up or down
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from axonlaunch.planning.memory.allocation_trace import BlockPlace, Recording
from axonlaunch.planning.memory.caching_allocator import Change

_NEAR = 2
"""Blocks: what comes and goes within so many of them goes along with its block, and what goes later
is held until an end of the model."""
FEWEST = 2 * (_NEAR + 1) + 1
"""Blocks of a stage that a recording must have: one in the middle, and what is near neither end."""


@dataclass(frozen=True)
class BlockPass:
    """One block's turn in a pass through a stage, or what happens between blocks.

    Attributes:
        block: None between blocks.
        passage: Number of the pass up or down a stage, from 1.
        changes: Storages that come and go in it.
    """

    block: BlockPlace | None
    passage: int
    changes: list[Change]


def extended(recording: Recording, *, blocks: int, counts: Mapping[int, int]) -> list[Change]:
    """Return the changes of a model with more blocks.

    Args:
        recording: Of at least ``FEWEST`` blocks in each stage, all of one kind.
        blocks: How many more each stage has.
        counts: How many each stage has in the recording.

    Raises:
        ValueError: Blocks take turns in an order that can't be continued.
    """
    middle = {stage: count // 2 for stage, count in counts.items()}
    return list(TraceExtender(recording, blocks, middle).changes())


class TraceExtender:
    """Puts further blocks into the middle of a recording of a shallow model's step.

    The turns of the middle block are repeated, and each storage belongs to a block, its home. With
    the middle block 1 of 0 1 2 and two more blocks:

        forward    0 1 2    becomes    0 1 2 3 4
        backward   2 1 0    becomes    4 3 2 1 0

    A storage of block 0 is there once, as it was. One of block 2 is there once, of what is now
    block 4. An activation of block 1 is there three times: its first copy comes and goes in the
    turns of block 1, the second in those of block 2, the third in those of block 3. What
    another block does to it goes along: if block 2 frees the output of block 1, blocks 2, 3 and 4
    free the outputs of 1, 2 and 3.
    """

    def __init__(self, recording: Recording, blocks: int, middle: Mapping[int, int]) -> None:
        self._more = blocks
        self._middle = middle
        self._turns = list(_turns(recording))
        self._home = dict(recording.owners)
        for turn in self._turns:
            if turn.block is not None:
                for change in turn.changes:
                    self._home.setdefault(change.storage, turn.block)
        self._numbers: dict[tuple[int, int], int] = {}

    def changes(self) -> Iterator[Change]:
        """Yield every allocation and release of the deeper model's step, in order."""
        # The deeper model's turns in order; what is between blocks goes by its number instead.
        slots: dict[tuple[int, BlockPlace | None], list[tuple[int, Change]]] = {}
        for number, turn in enumerate(self._turns):
            for block in self._blocks_for(number):
                slots[number if block is None else turn.passage, block] = []
        for number, turn in enumerate(self._turns):
            for position, change in enumerate(turn.changes):
                for shift in self._shifts(change.storage):
                    key: tuple[int, BlockPlace | None] = (number, None)
                    if turn.block is not None:
                        key = turn.passage, self._moved(turn.block, change.storage, shift)
                    if key not in slots:
                        raise ValueError(
                            f"block {key[1]} has no turn where another one's storage goes"
                        )
                    slots[key].append((position, self._copied(change, shift)))
        for positioned in slots.values():
            # Within a turn things happen in the order in which they did in the shallow model's.
            yield from (change for _, change in sorted(positioned, key=lambda item: item[0]))

    def _blocks_for(self, number: int) -> list[BlockPlace | None]:
        """Return the deeper model's blocks, in order, that take turns where one did."""
        block = self._turns[number].block
        if block is None:
            return [None]
        stage, index = block
        middle = self._middle[stage]
        if index != middle:
            return [(stage, index if index < middle else index + self._more)]
        copies: list[BlockPlace | None] = [(stage, index + n) for n in range(self._more + 1)]
        return copies if self._ascends(number) else copies[::-1]

    def _ascends(self, number: int) -> bool:
        """Say whether the pass of a turn goes up through the blocks, by the turns beside it."""
        turn = self._turns[number]
        assert turn.block is not None
        for other in (number - 1, number + 1):
            if not 0 <= other < len(self._turns):
                continue
            neighbour = self._turns[other]
            if neighbour.passage == turn.passage and neighbour.block is not None:
                return (neighbour.block[1] < turn.block[1]) == (other < number)
        return True

    def _shifts(self, storage: int) -> range:
        """Return by how many blocks each of a storage's copies is moved up."""
        home = self._home.get(storage)
        if home is None or home[1] < self._middle[home[0]]:
            return range(1)
        if home[1] > self._middle[home[0]]:
            return range(self._more, self._more + 1)
        return range(self._more + 1)

    def _moved(self, block: BlockPlace, storage: int, shift: int) -> BlockPlace:
        """Return the block in whose turn a copy changes as the storage does in this block's."""
        stage, index = block
        home = self._home[storage]
        if home[0] == stage and abs(index - home[1]) <= _NEAR:
            return stage, index + shift
        return stage, index if index <= self._middle[stage] else index + self._more

    def _copied(self, change: Change, shift: int) -> Change:
        storage = self._numbers.setdefault((change.storage, shift), len(self._numbers))
        return Change(storage, change.num_bytes, change.stream)


def _turns(recording: Recording) -> Iterator[BlockPass]:
    """Yield turns, with those of one pass up or down a stage under one number."""
    starts = [start for start, _ in recording.visits]
    passage, before, step = 0, None, 0
    for (start, block), stop in zip(
        recording.visits, [*starts[1:], len(recording.changes)], strict=True
    ):
        if block is None or before is None or block[0] != before[0]:
            passage, step = passage + 1, 0
        else:
            move = block[1] - before[1]
            if abs(move) != 1 or (step and move != step):
                passage, step = passage + 1, 0
            else:
                step = move
        before = block
        yield BlockPass(block, passage, recording.changes[start:stop])
