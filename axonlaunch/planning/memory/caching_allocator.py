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
_ADDRESSES = 1 << 50
"""Of a segment that grows: more than any device has memory."""


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
    """Part of a segment, between its neighbours; of one that grows it may have no memory yet."""

    __slots__ = ("after", "before", "free", "mapped", "pool", "size", "start")

    def __init__(self, pool: _Pool, start: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.start, self.size, self.mapped = pool, start, size, mapped
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


@dataclass(eq=False)
class _Pool:
    """Segments of one stream for small or for large allocations.

    Attributes:
        free: ``(size, start)`` of free blocks, in order: the best fit is the first that fits.
        blocks: Of the same, by start.
        unmapped: Blocks without memory of a segment that grows, by start: the last is its end.
        base: Where that segment starts, which its pages are counted from.
    """

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    unmapped: dict[int, _Block] = field(default_factory=dict)
    base: int = 0


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
            settings: The user's; with ``expandable`` each pool has one segment, which grows.
                None: torch's own.
            capacity: Bytes that the driver gives; where they don't do, cached segments, and free
                pages of those that grow, go back before more is asked. None: without end.
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
        # A block that can grow counts as being as large as it can become: others may be better.
        while at + 1 < len(pool.free) and _room(pool, at + 1) < _room(pool, at):
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
        """Map the pages that a run of free and unmapped blocks lacks, and make one block of it."""
        if not pool.unmapped:
            pool.base, self._top = self._top, self._top + _ADDRESSES
            pool.unmapped[pool.base] = _Block(pool, pool.base, _ADDRESSES, mapped=False)
        block, missing = self._room_for(pool, size)
        if self._capacity is not None and self.reserved + missing > self._capacity:
            self._return_cached()
            block, _ = self._room_for(pool, size)
        self._occupy(block, size)
        while block.size < size:
            after = block.after
            assert after is not None
            self._occupy(after, size - block.size)
            self._join(block, after)
        return block

    def _room_for(self, pool: _Pool, size: int) -> tuple[_Block, int]:
        """Return the first block of the lowest run that has room, and what is to be mapped."""
        for start in sorted(pool.unmapped):
            first = pool.unmapped[start]
            if first.before is not None and first.before.free:
                first = first.before
            missing, room, block = 0, 0, first
            while room < size and (block.free or not block.mapped):
                if not block.mapped:
                    missing += min(block.size, _up(size - room, self._page(pool)))
                room += block.size
                if block.after is None:
                    break
                block = block.after
            if room >= size:
                return first, missing
        raise AssertionError("the end of a segment has room for anything")

    def _occupy(self, block: _Block, size: int) -> None:
        """Take a free block, or map as many pages of an unmapped one as so many bytes need."""
        if block.mapped:
            self._take_out(block)
            return
        del block.pool.unmapped[block.start]
        mapped = min(block.size, _up(size, self._page(block.pool)))
        if mapped < block.size:
            rest = self._cut(block, mapped)
            rest.pool.unmapped[rest.start] = rest
        block.mapped = True
        self._reserve(mapped)

    def _unmap(self, block: _Block) -> None:
        """Give whole pages of a free block back to the driver."""
        pool, page = block.pool, self._page(block.pool)
        start = pool.base + _up(block.start - pool.base, page)
        end = pool.base + (block.start + block.size - pool.base) // page * page
        if start >= end:
            return
        self._take_out(block)
        if start > block.start:
            before, block = block, self._cut(block, start - block.start)
            self._put_back(before)
        if end < block.start + block.size:
            self._put_back(self._cut(block, end - block.start))
        block.mapped = False
        self.reserved -= block.size
        pool.unmapped[block.start] = block
        for one, other in ((block, block.after), (block.before, block)):
            if one is not None and other is not None and not (one.mapped or other.mapped):
                del pool.unmapped[other.start]
                self._join(one, other)

    def _page(self, pool: _Pool) -> int:
        return SMALL_SEGMENT if pool.small else self._settings.large_segment

    def _split(self, block: _Block, size: int) -> None:
        self._put_back(self._cut(block, size))

    @staticmethod
    def _cut(block: _Block, size: int) -> _Block:
        """Cut a block after so many bytes; return what comes behind them."""
        rest = _Block(block.pool, block.start + size, block.size - size, mapped=block.mapped)
        block.size = size
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        return rest

    @staticmethod
    def _join(block: _Block, after: _Block) -> None:
        """Add to a block the one behind it."""
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _free(self, block: _Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take_out(before)
            self._join(before, block)
            block = before
        if after is not None and after.free:
            self._take_out(after)
            self._join(block, after)
        self._put_back(block)

    def _return_cached(self) -> None:
        """Give segments that are free as a whole back, and free pages of those that grow."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if pool.unmapped:
                    self._unmap(block)
                elif block.before is None and block.after is None:
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


def _room(pool: _Pool, at: int) -> int:
    """Return how large a free block can become where it is."""
    block = pool.blocks[pool.free[at][1]]
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
