"""Simulates torch's caching allocator for CUDA on a recorded sequence of requests.

Rounding, pools per stream and fragmentation follow from the requests, without fitted factors. CUDA
graphs and user-defined memory pools are not supported.

Source of the allocator's rules: PyTorch, ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from axonlaunch.system.node.allocator_settings import AllocatorSettings
from axonlaunch.system.text.formatting import MIB

MIN_BLOCK = 512
"""kMinBlockSize: every size is rounded up to a multiple of this"""
SMALL_SIZE = MIB
"""kSmallSize: largest allocation of the small pool"""
SMALL_SEGMENT = 2 * MIB
"""kSmallBuffer: segment size of the small pool"""
MIN_LARGE = 10 * MIB
"""kMinLargeAlloc: allocations of at least this size get a segment of that size. Smaller ones in the
large pool get a segment of ``AllocatorSettings.large_segment``."""
ROUND_LARGE = 2 * MIB
"""kRoundLarge: the size of such a segment is rounded up to a multiple of this"""
_ADDRESS_RANGE = 1 << 50
"""Address range of an expandable segment; larger than the memory of any device."""


class Change(NamedTuple):
    """Allocation, resize or release of a storage. A recording has 100,000, so it is a tuple.

    Attributes:
        storage: Number of the storage. Numbers are never reused.
        num_bytes: New size in bytes; 0 frees the storage.
        stream: Current stream. A block is reused only on the same stream.
    """

    storage: int
    num_bytes: int
    stream: int = 0


class _Block:
    """Part of a segment, linked to its neighbors. In an expandable segment it may be unmapped."""

    __slots__ = ("free", "mapped", "next", "pool", "previous", "size", "start")

    def __init__(self, pool: _Pool, start: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.start, self.size, self.mapped = pool, start, size, mapped
        self.free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None


@dataclass(eq=False)
class _Pool:
    """Segments of one stream for small or for large allocations.

    Attributes:
        small: Whether the pool serves small allocations.
        free: ``(size, start)`` of free blocks, sorted; the best fit is the first large enough.
        blocks: Free blocks by start address.
        unmapped: Unmapped blocks of an expandable segment by start address; the last one is the end
            of the segment.
        base: Start address of the expandable segment, from which its pages are counted.
    """

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    unmapped: dict[int, _Block] = field(default_factory=dict)
    base: int = 0


class Allocator:
    """Simulates torch's caching allocator of one device.

    Attributes:
        reserved: Bytes currently reserved from the driver.
        peak_reserved: Maximum of ``reserved``, as in ``torch.cuda.max_memory_reserved``.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, capacity: int | None = None
    ) -> None:
        """Create an allocator without memory.

        Args:
            settings: Allocator settings of the user. With ``expandable`` each pool has a single
                expandable segment. None for torch's defaults.
            capacity: Bytes that the driver can provide. If a request would exceed them, free
                segments and free pages of expandable segments are returned to the driver first.
                None for unlimited memory.
        """
        self.reserved = self.peak_reserved = 0
        self._settings = settings or AllocatorSettings()
        self._capacity = capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, _Block] = {}
        self._next_address = 0

    def replay(self, changes: Iterable[Change]) -> None:
        """Allocate, resize and free storages in order."""
        for storage, num_bytes, stream in changes:
            block = self._blocks.pop(storage, None)
            if block is not None:
                self._free(block)
            if num_bytes:
                self._blocks[storage] = self._allocate(num_bytes, stream)

    def _allocate(self, num_bytes: int, stream: int) -> _Block:
        size = self._round_size(num_bytes)
        small = size <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = self._take_best_fit(pool, size)
        if block is None:
            grows = self._settings.expandable
            block = self._grow(pool, size) if grows else self._new_segment(pool, size)
        block.free = False
        if self._should_split(block, size):
            self._split(block, size)
        return block

    def _round_size(self, num_bytes: int) -> int:
        interval = max(0, (num_bytes // MIB).bit_length() - 1)
        parts = self._settings.divisions[min(interval, len(self._settings.divisions) - 1)]
        if parts <= 1 or num_bytes <= MIN_BLOCK * parts:
            return _round_up(num_bytes, MIN_BLOCK)
        return _round_up(num_bytes, (1 << num_bytes.bit_length() - 1) // parts)

    def _take_best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Remove and return the smallest usable free block; None if there is no such block."""
        index = bisect_left(pool.free, (size, -1))
        if index == len(pool.free):
            return None
        # A block that can expand counts with its expanded size, so a later one may fit better.
        while index + 1 < len(pool.free) and _expanded_size(pool, index + 1) < _expanded_size(
            pool, index
        ):
            index += 1
        found_size, limit = pool.free[index][0], self._settings.max_split_size
        if found_size >= limit and (
            size < limit or found_size >= size + self._settings.max_rounding
        ):
            return None
        return pool.blocks.pop(pool.free.pop(index)[1])

    def _should_split(self, block: _Block, size: int) -> bool:
        remainder = block.size - size
        if block.pool.small or self._settings.expandable:
            return remainder >= MIN_BLOCK
        return remainder > SMALL_SIZE and size < self._settings.max_split_size

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.small:
            segment = SMALL_SEGMENT
        else:
            segment = (
                self._settings.large_segment if size < MIN_LARGE else _round_up(size, ROUND_LARGE)
            )
        if self._capacity is not None and self.reserved + segment > self._capacity:
            self._return_cached()
        self._reserve(segment)
        # Leave a gap between segments.
        block = _Block(pool, self._next_address, segment)
        self._next_address += segment + MIN_BLOCK
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Join adjacent free and unmapped blocks to one block, and map the missing pages."""
        if not pool.unmapped:
            pool.base, self._next_address = self._next_address, self._next_address + _ADDRESS_RANGE
            pool.unmapped[pool.base] = _Block(pool, pool.base, _ADDRESS_RANGE, mapped=False)
        block, missing = self._find_room(pool, size)
        if self._capacity is not None and self.reserved + missing > self._capacity:
            self._return_cached()
            block, _ = self._find_room(pool, size)
        self._map(block, size)
        while block.size < size:
            next_block = block.next
            assert next_block is not None
            self._map(next_block, size - block.size)
            self._join(block, next_block)
        return block

    def _find_room(self, pool: _Pool, size: int) -> tuple[_Block, int]:
        """Return the first of the lowest adjacent blocks with enough room, and the bytes to map."""
        for start in sorted(pool.unmapped):
            first = pool.unmapped[start]
            if first.previous is not None and first.previous.free:
                first = first.previous
            missing, room, block = 0, 0, first
            while room < size and (block.free or not block.mapped):
                if not block.mapped:
                    missing += min(block.size, _round_up(size - room, self._page(pool)))
                room += block.size
                if block.next is None:
                    break
                block = block.next
            if room >= size:
                return first, missing
        raise AssertionError("the end of a segment has room for anything")

    def _map(self, block: _Block, size: int) -> None:
        """Remove a free block from its pool, or map ``size`` bytes of an unmapped block."""
        if block.mapped:
            self._remove_from_pool(block)
            return
        del block.pool.unmapped[block.start]
        mapped = min(block.size, _round_up(size, self._page(block.pool)))
        if mapped < block.size:
            remainder = self._cut(block, mapped)
            remainder.pool.unmapped[remainder.start] = remainder
        block.mapped = True
        self._reserve(mapped)

    def _unmap(self, block: _Block) -> None:
        """Return the full pages of a free block to the driver."""
        pool, page = block.pool, self._page(block.pool)
        start = pool.base + _round_up(block.start - pool.base, page)
        end = pool.base + (block.start + block.size - pool.base) // page * page
        if start >= end:
            return
        self._remove_from_pool(block)
        if start > block.start:
            previous_block, block = block, self._cut(block, start - block.start)
            self._add_to_pool(previous_block)
        if end < block.start + block.size:
            self._add_to_pool(self._cut(block, end - block.start))
        block.mapped = False
        self.reserved -= block.size
        pool.unmapped[block.start] = block
        for left, right in ((block, block.next), (block.previous, block)):
            if left is not None and right is not None and not (left.mapped or right.mapped):
                del pool.unmapped[right.start]
                self._join(left, right)

    def _page(self, pool: _Pool) -> int:
        return SMALL_SEGMENT if pool.small else self._settings.large_segment

    def _split(self, block: _Block, size: int) -> None:
        self._add_to_pool(self._cut(block, size))

    @staticmethod
    def _cut(block: _Block, size: int) -> _Block:
        """Cut a block after ``size`` bytes and return the remainder."""
        remainder = _Block(block.pool, block.start + size, block.size - size, mapped=block.mapped)
        block.size = size
        remainder.previous, remainder.next, block.next = block, block.next, remainder
        if remainder.next is not None:
            remainder.next.previous = remainder
        return remainder

    @staticmethod
    def _join(block: _Block, next_block: _Block) -> None:
        """Merge a block with the next one."""
        block.size += next_block.size
        block.next = next_block.next
        if block.next is not None:
            block.next.previous = block

    def _free(self, block: _Block) -> None:
        previous_block, next_block = block.previous, block.next
        if previous_block is not None and previous_block.free:
            self._remove_from_pool(previous_block)
            self._join(previous_block, block)
            block = previous_block
        if next_block is not None and next_block.free:
            self._remove_from_pool(next_block)
            self._join(block, next_block)
        self._add_to_pool(block)

    def _return_cached(self) -> None:
        """Return fully free segments, and free pages of expandable segments, to the driver."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if pool.unmapped:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._remove_from_pool(block)
                    self.reserved -= block.size

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    @staticmethod
    def _add_to_pool(block: _Block) -> None:
        block.free = True
        insort(block.pool.free, (block.size, block.start))
        block.pool.blocks[block.start] = block

    @staticmethod
    def _remove_from_pool(block: _Block) -> None:
        block.free = False
        del block.pool.free[bisect_left(block.pool.free, (block.size, block.start))]
        del block.pool.blocks[block.start]


def _expanded_size(pool: _Pool, index: int) -> int:
    """Return the size of a free block together with an unmapped block after it."""
    block = pool.blocks[pool.free[index][1]]
    next_block = block.next
    return block.size + (next_block.size if next_block is not None and not next_block.mapped else 0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
