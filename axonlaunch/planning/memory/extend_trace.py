"""Makes of a shallow model's recording what a deeper one's would be: its middle blocks, repeated.

A block's storages come and go a fixed number of blocks from where they belong, so each of them is
repeated with its block, moved along. What passes through blocks in another order than up or down
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from axonlaunch.planning.memory.allocation_trace import Place, Recording
from axonlaunch.planning.memory.caching_allocator import Change

_NEAR = 2
"""Blocks: what comes and goes within so many of them goes along with its block, and what goes later
is held until an end of the model."""
FEWEST = 2 * (_NEAR + 1) + 1
"""Blocks of a stage that a recording must have: one in the middle, and what is near neither end."""


@dataclass(frozen=True)
class BlockPass:
    """One block's turn in a pass through a stage."""

    block: Place | None
    passage: int
    changes: list[Change]


@dataclass
class Slot:
    """A turn in the deeper model: what comes of which position in the shallow one's turn."""

    changes: list[tuple[int, Change]] = field(default_factory=list)


def stretched(recording: Recording, *, blocks: int, counts: Mapping[int, int]) -> list[Change]:
    """Return the changes of a model with more blocks.

    Args:
        recording: Of at least ``FEWEST`` blocks in each stage, all of one kind.
        blocks: How many more each stage has.
        counts: How many each stage has in the recording.

    Raises:
        ValueError: Blocks take turns in an order that can't be continued.
    """
    stretch = TraceExtender(
        recording, blocks, {stage: count // 2 for stage, count in counts.items()}
    )
    return list(stretch.changes())


class TraceExtender:
    """Puts further blocks into the middle of a recording of a shallow model's step.

    Each pass over a block (forward or backward) is repeated: what the pass allocates gets storages
    of its own in every repetition, and what it frees is freed in the pass that mirrors it. A model
    of blocks 0 1 2 with two more becomes 0 1 1' 1" 2, and its backward 2 1" 1' 1 0.
    """

    def __init__(self, recording: Recording, blocks: int, middle: Mapping[int, int]) -> None:
        self._more = blocks
        self._middle = middle
        self._visits = list(_visits(recording))
        self._home = dict(recording.owners)
        for visit in self._visits:
            if visit.block is not None:
                for change in visit.changes:
                    self._home.setdefault(change.storage, visit.block)
        self._born_inside = {
            change.storage
            for visit in self._visits
            if visit.block is not None
            for change in visit.changes
        }
        self._numbers: dict[tuple[int, int], int] = {}

    def changes(self) -> Iterator[Change]:
        """Yield every allocation and release of the deeper model's step, in order."""
        spots: dict[tuple[int, Place], Slot] = {}
        order: list[Slot] = []
        for at, visit in enumerate(self._visits):
            for place in self._places(at):
                spot = Slot()
                order.append(spot)
                if place is not None:
                    spots[visit.passage, place] = spot
                else:
                    spots[-1 - at, (0, 0)] = spot
        for at, visit in enumerate(self._visits):
            for position, change in enumerate(visit.changes):
                for copy in self._copies(change.storage):
                    key = (-1 - at, (0, 0))
                    if visit.block is not None:
                        key = visit.passage, self._target(change.storage, copy, visit.block)
                    if key not in spots:
                        raise ValueError(
                            f"block {key[1]} has no turn where another one's storage goes"
                        )
                    spots[key].changes.append((position, self._as(change, copy)))
        for spot in order:
            spot.changes.sort(key=lambda one: one[0])
            yield from (change for _, change in spot.changes)

    def _places(self, at: int) -> list[Place | None]:
        """Return the turns of the deeper model that take a turn's place."""
        visit = self._visits[at]
        if visit.block is None:
            return [None]
        stage, index = visit.block
        middle = self._middle[stage]
        if index != middle:
            return [(stage, index if index < middle else index + self._more)]
        copies: list[Place | None] = [(stage, index + n) for n in range(self._more + 1)]
        return copies if self._ascends(at) else copies[::-1]

    def _ascends(self, at: int) -> bool:
        """Say whether a pass goes up through the blocks."""
        here = self._visits[at]
        assert here.block is not None
        for other in self._visits[max(0, at - 1) : at + 2]:
            if other is not here and other.passage == here.passage and other.block is not None:
                before = self._visits.index(other, max(0, at - 1)) < at
                return (other.block[1] < here.block[1]) == before
        return True

    def _copies(self, storage: int) -> range:
        """Return how far a storage's copies are moved up."""
        home = self._home.get(storage)
        if home is None or home[1] < self._middle[home[0]]:
            return range(1)
        if home[1] > self._middle[home[0]]:
            return range(self._more, self._more + 1)
        return range(self._more + 1)

    def _target(self, storage: int, copy: int, block: Place) -> Place:
        """Return the block in whose turn a copy changes as the storage does in a block's turn."""
        stage, index = block
        home = self._home[storage]
        if home[0] == stage and abs(index - home[1]) <= _NEAR:
            return stage, index + copy
        return stage, index if index <= self._middle[stage] else index + self._more

    def _as(self, change: Change, copy: int) -> Change:
        number = self._numbers.setdefault((change.storage, copy), len(self._numbers))
        return Change(number, change.num_bytes, change.stream)


def _visits(recording: Recording) -> Iterator[BlockPass]:
    """Yield turns, with those of one pass up or down a stage under one number."""
    starts = [start for start, _ in recording.visits]
    passage, before, step = 0, None, 0
    for (start, place), stop in zip(
        recording.visits, [*starts[1:], len(recording.changes)], strict=True
    ):
        if place is None or before is None or place[0] != before[0]:
            passage, step = passage + 1, 0
        else:
            move = place[1] - before[1]
            if abs(move) != 1 or (step and move != step):
                passage, step = passage + 1, 0
            else:
                step = move
        before = place
        yield BlockPass(place, passage, recording.changes[start:stop])
