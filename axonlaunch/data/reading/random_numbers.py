"""Seeds the global random generators for each sample, and puts their states back.

The generators are those of torch (on the CPU), of ``numpy.random`` and of Python's ``random``. A
sample then has the same random numbers on every layout, after a resume and in any process.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_TORCH = "torch's"


def sample_seed(seed: int, epoch: int, index: int, *, part: int = 0) -> int:
    """Return the seed of a sample's random numbers, a hash of the arguments in 64 bits.

    Args:
        seed: Seed of the run.
        epoch: Number of the pass over the data.
        index: Index of the sample in its dataset, or its position in a stream.
        part: Distinguishes samples of several kinds, such as held-out ones.
    """
    key = struct.pack("<4q", seed, epoch, index, part)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed the global generators with 64 bits; torch's only if torch is imported.

    numpy uses the lower 32 bits, because a longer seed takes five times as long.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators, by their names in messages."""
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "numpy.random": np.random.get_state(),
    }
    if (torch := sys.modules.get("torch")) is not None:
        states[_TORCH] = torch.default_generator.get_state()
    return states


def have_moved(states: dict[str, Any]) -> bool:
    """Return whether a global generator was used since ``generator_states`` returned these."""
    current = generator_states()
    previous_numpy, current_numpy = states["numpy.random"], current["numpy.random"]
    return (
        states["Python's random"] != current["Python's random"]
        or previous_numpy[2:] != current_numpy[2:]
        or not np.array_equal(previous_numpy[1], current_numpy[1])
        or (_TORCH in states and not bool((states[_TORCH] == current[_TORCH]).all()))
    )


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the states of the global generators back at the end."""
    states = generator_states()
    try:
        yield
    finally:
        random.setstate(states["Python's random"])
        np.random.set_state(states["numpy.random"])
        if _TORCH in states:
            sys.modules["torch"].default_generator.set_state(states[_TORCH])
