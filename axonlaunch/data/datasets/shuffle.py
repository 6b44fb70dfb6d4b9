"""Shuffled order of samples, computed for any position without storing a permutation.

It depends only on the seed and the global sample index, so neither the number of ranks nor a
restart changes it.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# Four rounds are enough for a large domain (Luby and Rackoff, 1988); small ones need more.
_ROUNDS = 8


def dataset_indices(positions: Indices, *, num_samples: int, seed: int, split: int = 0) -> Indices:
    """Return the dataset's index of the sample at each global sample index.

    Args:
        positions: Global sample indices: 0 is the first sample of the run, ``num_samples`` the
            first of the second epoch, which is shuffled again.
        num_samples: Size of the dataset.
        seed: Seed of the run.
        split: Distinguishes the orders of several sets of samples with one seed.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), num_samples)
    indices = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permute(places[here], size=num_samples, key=(seed, split, int(epoch)))
    return indices


def permute(places: Indices, *, size: int, key: tuple[int, ...]) -> Indices:
    """Apply a keyed permutation of ``range(size)`` to each index.

    An index is split into two digits, with bases near the square root of the size, and each digit
    in turn is shifted by a random function of the other: a generalized Feistel network. The product
    of the bases exceeds the size a little. An index that leaves the range is mapped again, along
    its cycle, until it is in the range. Both methods are from Black and Rogaway, Ciphers with
    Arbitrary Finite Domains (2002).
    """
    base = isqrt(size - 1) + 1
    bases = (np.uint64(base), np.uint64(-(-size // base)))
    round_keys = _round_keys(key)
    walked = places.astype(np.uint64)
    outside = np.arange(len(walked))
    while len(outside):
        walked[outside] = _feistel(walked[outside], bases, round_keys)
        outside = outside[walked[outside] >= size]
    return walked.astype(np.int64)


def mix(words: _Words) -> _Words:
    """Scramble 64-bit words by SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _feistel(words: _Words, bases: tuple[np.uint64, np.uint64], round_keys: _Words) -> _Words:
    high, low = words // bases[1], words % bases[1]
    for number, round_key in enumerate(round_keys):
        if number % 2 == 0:
            high = (high + mix(low ^ round_key) % bases[0]) % bases[0]
        else:
            low = (low + mix(high ^ round_key) % bases[1]) % bases[1]
    return high * bases[1] + low


def _round_keys(key: tuple[int, ...]) -> _Words:
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = mix(state ^ np.uint64(part % 2**64))
    numbers: _Words = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
    return mix(state + numbers)
