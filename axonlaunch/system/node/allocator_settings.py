"""Settings of torch's GPU allocator, which must be made before torch is imported.

Segments of fixed size leave gaps that later tensors do not fit into. If a run needs almost all of
the device's memory, gaps can be gigabytes. Therefore ranks use expandable segments, as torchtitan
does, unless the user has configured the allocator.

Source: PyTorch, "CUDA semantics", and ``c10/core/AllocatorConfig.cpp`` of 2.13.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables in torch's order; torch reads only the first one that is set."""
_DEFAULT = "expandable_segments:True"
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[]*)")
_MIB = 2**20
_INTERVALS = 16
"""Number of intervals between powers of two, from 1 MiB, with separate rules for rounding."""


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings that determine how much memory torch's allocator reserves.

    Attributes:
        expandable: Whether segments can grow.
        max_split_size: Size in bytes from which blocks are never split.
        max_rounding: Bytes by which an unsplit block may be larger than the requested size.
        large_segment: Minimum bytes of a segment for tensors above 1 MiB.
        divisions: Number of parts of each interval from 2^n to 2^(n+1) MiB; sizes are rounded up to
            the next part. 0 and 1 do not divide.
        max_locked_rounding: Size in bytes up to which blocks of page-locked host memory are rounded
            up to a power of two.
        not_replayed: Names of configured settings that ``caching_allocator`` does not simulate.
    """

    expandable: bool = False
    max_split_size: int = sys.maxsize
    max_rounding: int = 20 * _MIB
    large_segment: int = 20 * _MIB
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    max_locked_rounding: int = sys.maxsize
    not_replayed: tuple[str, ...] = ()

    def page_locked(self, num_bytes: int) -> int:
        """Return the bytes of page-locked host memory that torch allocates for a block.

        Source: PyTorch, ``aten/src/ATen/core/CachingHostAllocator.h``, ``allocate``.
        """
        if not 0 < num_bytes <= self.max_locked_rounding:
            return num_bytes
        return 1 << (num_bytes - 1).bit_length()

    @classmethod
    def of(cls, text: str) -> AllocatorSettings:
        """Parse a variable's text. Values that torch would reject are listed as not replayed."""
        values: dict[str, Any] = {}
        not_replayed = []
        for name, value in _SETTING.findall("".join(text.split())):
            try:
                if name == "expandable_segments":
                    values["expandable"] = value == "True"
                elif name == "max_split_size_mb":
                    values["max_split_size"] = int(value) * _MIB
                elif name == "max_non_split_rounding_mb":
                    values["max_rounding"] = int(value) * _MIB
                elif name == "large_segment_size_mb":
                    values["large_segment"] = int(value) * _MIB
                elif name in _PAGE_LOCKED:
                    limit = min(int(value) * _MIB, values.get("max_locked_rounding", sys.maxsize))
                    values["max_locked_rounding"] = limit
                elif name == "roundup_power2_divisions":
                    values["divisions"] = _divisions(value)
                elif name in _AFFECTS_SIZE and value != "native":
                    not_replayed.append(name)
            except ValueError:
                not_replayed.append(name)
        return cls(**values, not_replayed=tuple(sorted(not_replayed)))


_PAGE_LOCKED = {"pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"}
# Other settings are about threads, locks and errors.
_AFFECTS_SIZE = {"backend", "garbage_collection_threshold", "per_process_memory_fraction"}


def grow_segments() -> None:
    """Enable expandable segments for this process and its children; call before importing torch."""
    if _user_settings() is None:
        os.environ[_VARIABLES[-1]] = _DEFAULT


def settings_of_ranks() -> AllocatorSettings:
    """Return the settings of ranks that this process would start."""
    settings = _user_settings()
    return AllocatorSettings.of(_DEFAULT if settings is None else settings)


def _user_settings() -> str | None:
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), None)


def _divisions(value: str) -> tuple[int, ...]:
    """Return the number of parts of each interval from text like ``4`` or ``[256:1,512:2,>:4]``.

    Intervals below the first named one use its value, those above the last named one the value of
    ``>``. All other intervals are not divided.
    """
    if not value.startswith("["):
        return (int(value),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = 0
    for number, item in enumerate(value.strip("[]").split(",")):
        limit, _, parts = item.partition(":")
        if limit == ">":
            divisions[last + 1 :] = [int(parts)] * (_INTERVALS - last - 1)
            continue
        last = min(int(limit).bit_length() - 1, _INTERVALS - 1)
        if number == 0:
            divisions[:last] = [int(parts)] * last
        divisions[last] = int(parts)
    return tuple(divisions)
