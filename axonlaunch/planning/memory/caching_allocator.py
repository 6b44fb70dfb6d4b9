"""torch's caching allocator for CUDA, replayed on what a run asks of it.

Its rounding, its pools by stream and its fragmentation follow from the run; no factor is fitted for
them. It knows neither graphs nor pools that a user makes.

Source of the allocator's rules: PyTorch, ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from axonlaunch.system.allocator_settings import AllocatorSettings
from axonlaunch.system.formatting import MIB

MIN_BLOCK = 512
"""kMinBlockSize: every size is rounded up to a multiple of it"""
SMALL_SIZE = MIB
"""kSmallSize: largest allocation of the small pool"""
SMALL_SEGMENT = 2 * MIB
"""kSmallBuffer: what the small pool asks the driver for"""
MIN_LARGE = 10 * MIB
"""kMinLargeAlloc: allocations from here on get a segment of their own size; those below ask the
driver for the settings' ``large_segment``"""
ROUND_LARGE = 2 * MIB
"""kRoundLarge: that size is rounded up to a multiple of it"""


@dataclass(frozen=True, slots=True)
class Change:
    """A storage's size from now on.

    Attributes:
        storage: Which one; numbers are not used again.
        num_bytes: 0 frees it.
        stream: The one that was current; a block is used again only on its own.
    """

    storage: int
    num_bytes: int
    stream: int = 0


class _Block:
    """Part of a segment, between its neighbours."""

    __slots__ = ("after", "before", "free", "pool", "size", "start")

    def __init__(self, pool: _Pool, start: int, size: int) -> None:
        self.pool, self.start, self.size = pool, start, size
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


@dataclass(eq=False)
class _Pool:
    """Segments of one stream for small or for large allocations.

    Attributes:
        free: ``(size, start)`` of free blocks, in order: the best fit is the first that fits.
        blocks: Of the same, by start.
        last: The block at the end of an expandable segment.
    """

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    last: _Block | None = None


class Allocator:
    """torch's caching allocator on a device, without a device.

    Attributes:
        reserved: Bytes held of the driver.
        peak_reserved: The most of that: what ``torch.cuda.max_memory_reserved`` shows.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, capacity: int | None = None
    ) -> None:
        """Begin empty.

        Args:
            settings: The user's; with ``expandable`` each pool has one segment, which grows at its
                end. None: torch's own.
            capacity: Bytes that the driver gives; where they don't do, cached segments go back
                before more is asked, but for those that grow, whose free pages are not followed:
                what is reserved then is more than a device has. None: without end.
        """
        self.reserved = self.peak_reserved = 0
        self._settings = settings or AllocatorSettings()
        self._capacity = capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, _Block] = {}
        self._top = 0

    def replay(self, changes: Iterable[Change]) -> None:
        """Let storages come, change their size and go."""
        for change in changes:
            block = self._held.pop(change.storage, None)
            if block is not None:
                self._free(block)
            if change.num_bytes:
                self._held[change.storage] = self._allocate(change.num_bytes, change.stream)

    def _allocate(self, num_bytes: int, stream: int) -> _Block:
        size = self._rounded(num_bytes)
        small = size <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = self._best_fit(pool, size)
        if block is None:
            grows = self._settings.expandable
            block = self._grown(pool, size) if grows else self._new_segment(pool, size)
        block.free = False
        if self._is_split(block, size):
            self._split(block, size)
        return block

    def _rounded(self, num_bytes: int) -> int:
        interval = max(0, (num_bytes // MIB).bit_length() - 1)
        parts = self._settings.divisions[min(interval, len(self._settings.divisions) - 1)]
        if parts <= 1 or num_bytes <= MIN_BLOCK * parts:
            return _up(num_bytes, MIN_BLOCK)
        return _up(num_bytes, (1 << num_bytes.bit_length() - 1) // parts)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block that is large enough, if one may be used."""
        at = bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        # A block that can grow counts as being as large as it can become: any other is better.
        if pool.last is pool.blocks[pool.free[at][1]] and at + 1 < len(pool.free):
            at += 1
        found, limit = pool.free[at][0], self._settings.max_split_size
        if found >= limit and (size < limit or found >= size + self._settings.max_rounding):
            return None
        return pool.blocks.pop(pool.free.pop(at)[1])

    def _is_split(self, block: _Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._settings.expandable:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE and size < self._settings.max_split_size

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.small:
            segment = SMALL_SEGMENT
        else:
            segment = self._settings.large_segment if size < MIN_LARGE else _up(size, ROUND_LARGE)
        if self._capacity is not None and self.reserved + segment > self._capacity:
            self._return_cached()
        self._reserve(segment)
        # A gap keeps neighbours of different segments apart.
        block = _Block(pool, self._top, segment)
        self._top += segment + MIN_BLOCK
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """Map more pages behind the last block, which is used too if it is free."""
        step = SMALL_SEGMENT if pool.small else self._settings.large_segment
        last = pool.last
        if last is not None and last.free:
            self._take_out(last)
            more = _up(size - last.size, step)
            last.size += more
            self._reserve(more)
            return last
        segment = _up(size, step)
        self._reserve(segment)
        block = _Block(pool, self._top if last is None else last.start + last.size, segment)
        if last is None:
            self._top += 1 << 50  # room for this segment alone
        else:
            last.after, block.before = block, last
        pool.last = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.pool, block.start + size, block.size - size)
        block.size = size
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        if block.pool.last is block:
            block.pool.last = rest
        self._put_back(rest)

    def _free(self, block: _Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take_out(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            if block.pool.last is block:
                block.pool.last = before
            block = before
        if after is not None and after.free:
            self._take_out(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
            if block.pool.last is after:
                block.pool.last = block
        self._put_back(block)

    def _return_cached(self) -> None:
        """Give segments that are free as a whole back to the driver."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    self._take_out(block)
                    self.reserved -= block.size

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    @staticmethod
    def _put_back(block: _Block) -> None:
        block.free = True
        insort(block.pool.free, (block.size, block.start))
        block.pool.blocks[block.start] = block

    @staticmethod
    def _take_out(block: _Block) -> None:
        block.free = False
        del block.pool.free[bisect_left(block.pool.free, (block.size, block.start))]
        del block.pool.blocks[block.start]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
