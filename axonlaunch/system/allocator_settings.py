"""Whether torch's allocator of a GPU's memory grows its segments, which is said before its import.

Segments of fixed sizes leave gaps that no later tensor fits: gigabytes of a run that is close to
the device's memory. Ranks that axonlaunch starts grow them, as torchtitan's do, unless the user has
settings of his own.

Source: PyTorch, "CUDA semantics", ``expandable_segments``.
"""

from __future__ import annotations

import os
import re

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING = "expandable_segments:True"
_NAME = re.compile(r"(?:^|,)\s*([a-z]\w*)\s*:")
_NOT_REPLAYED = {
    *("backend", "garbage_collection_threshold", "max_non_split_rounding_mb", "max_split_size_mb"),
    "roundup_power2_divisions",
}


def grow_segments() -> None:
    """Let this process, and those that it starts, grow segments; call it before torch is there."""
    if not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = _GROWING


def segments_grow() -> bool:
    """Return whether the segments of ranks that this process would start grow."""
    settings = _settings()
    return not settings or any(
        _GROWING.lower() in text.replace(" ", "").lower() for text in settings
    )


def not_replayed() -> list[str]:
    """Return the user's settings that an estimate of what the allocator reserves does not know."""
    names = {name for text in _settings() for name in _NAME.findall(text)}
    return sorted(names & _NOT_REPLAYED)


def _settings() -> list[str]:
    return [os.environ[name] for name in _VARIABLES if name in os.environ]
