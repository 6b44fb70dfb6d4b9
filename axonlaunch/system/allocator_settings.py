"""Settings of torch's GPU allocator, which are made before torch is imported.

Segments of fixed sizes leave gaps that no later tensor fits: gigabytes of a run that is close to
the device's memory. Ranks that axonlaunch starts grow them, as torchtitan's do, unless the user has
settings of his own.

Source: PyTorch, "CUDA semantics", and ``c10/core/AllocatorConfig.cpp`` of 2.13.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In torch's order: of those that are set it reads the first alone."""
_OURS = "expandable_segments:True"
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[]*)")
_MIB = 2**20
_INTERVALS = 16
"""Powers of two from 1 MiB on, each of which sizes can be rounded in by a rule of its own."""


@dataclass(frozen=True)
class AllocatorSettings:
    """What of its settings decides how much torch's allocator reserves.

    Attributes:
        expandable: Whether segments grow.
        max_split_size: Bytes from which on a block is never split.
        max_rounding: Bytes by which a block that is not split may be larger than what it is for.
        large_segment: Bytes that it asks for at least, of tensors above 1 MiB.
        divisions: Of the sizes between 2^n and 2^(n+1) MiB: how many parts they are divided into, a
            size being rounded up to the next; 0 and 1: none.
        max_locked_rounding: Bytes up to which a block of page-locked host memory is rounded up to a
            power of two.
        not_replayed: Names of those that are set and that ``caching_allocator`` does not follow.
    """

    expandable: bool = False
    max_split_size: int = sys.maxsize
    max_rounding: int = 20 * _MIB
    large_segment: int = 20 * _MIB
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    max_locked_rounding: int = sys.maxsize
    not_replayed: tuple[str, ...] = ()

    def page_locked(self, num_bytes: int) -> int:
        """Return what torch takes of page-locked host memory for a block of so many bytes.

        Source: PyTorch, ``aten/src/ATen/core/CachingHostAllocator.h``, ``allocate``.
        """
        if not 0 < num_bytes <= self.max_locked_rounding:
            return num_bytes
        return 1 << (num_bytes - 1).bit_length()

    @classmethod
    def of(cls, text: str) -> AllocatorSettings:
        """Read what a variable says; a value that torch would refuse is not replayed."""
        known: dict[str, Any] = {}
        unknown = []
        for name, value in _SETTING.findall("".join(text.split())):
            try:
                if name == "expandable_segments":
                    known["expandable"] = value == "True"
                elif name == "max_split_size_mb":
                    known["max_split_size"] = int(value) * _MIB
                elif name == "max_non_split_rounding_mb":
                    known["max_rounding"] = int(value) * _MIB
                elif name == "large_segment_size_mb":
                    known["large_segment"] = int(value) * _MIB
                elif name in _OF_LOCKED:
                    largest = min(int(value) * _MIB, known.get("max_locked_rounding", sys.maxsize))
                    known["max_locked_rounding"] = largest
                elif name == "roundup_power2_divisions":
                    known["divisions"] = _divisions(value)
                elif name in _OF_SIZE and value != "native":
                    unknown.append(name)
            except ValueError:
                unknown.append(name)
        return cls(**known, not_replayed=tuple(sorted(unknown)))


_OF_LOCKED = {"pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"}
# The others are about threads, locks and errors.
_OF_SIZE = {"backend", "garbage_collection_threshold", "per_process_memory_fraction"}


def grow_segments() -> None:
    """Let this process, and those that it starts, grow segments; call it before torch is there."""
    if _said() is None:
        os.environ[_VARIABLES[-1]] = _OURS


def settings_of_ranks() -> AllocatorSettings:
    """Return the settings of ranks that this process would start."""
    said = _said()
    return AllocatorSettings.of(_OURS if said is None else said)


def _said() -> str | None:
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), None)


def _divisions(value: str) -> tuple[int, ...]:
    """Return the parts of each interval, as ``4`` or ``[256:1,512:2,>:4]`` says.

    An interval that is not named is rounded as nothing, but for those below the first and, with
    ``>``, those above the last.
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
