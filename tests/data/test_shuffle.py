import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from axonlaunch.data.datasets.shuffle import dataset_indices, permute


def test_every_small_size_is_permuted():
    for size in range(1, 200):
        got = permute(np.arange(size), size=size, key=(7, 0, 1))
        assert np.array_equal(np.sort(got), np.arange(size)), size


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_any_size_under_any_key_is_permuted(size, seed, epoch):
    got = permute(np.arange(size), size=size, key=(seed, 0, epoch))
    assert np.array_equal(np.sort(got), np.arange(size))


def test_shuffle_of_single_positions_in_huge_sets():
    size = 10**15 + 37
    places = np.array([0, 1, 2, size // 2, size - 1])
    together = permute(places, size=size, key=(1,))
    alone = [int(permute(places[i : i + 1], size=size, key=(1,))[0]) for i in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5
    assert all(0 <= position < size for position in alone)


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own():
    positions = np.arange(3 * 101)
    indices = dataset_indices(positions, num_samples=101, seed=4)
    epochs = indices.reshape(3, 101)
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    for first, other in itertools.combinations(epochs, 2):
        assert not np.array_equal(first, other)


def test_shuffled_order_depends_only_on_the_seed():
    positions = np.arange(50)
    first = dataset_indices(positions, num_samples=1000, seed=1)
    assert np.array_equal(first, dataset_indices(positions, num_samples=1000, seed=1))
    assert not np.array_equal(first, dataset_indices(positions, num_samples=1000, seed=2))
    assert np.array_equal(first[20:], dataset_indices(positions[20:], num_samples=1000, seed=1))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("size", [2, 3, 5, 10, 37])
def test_every_place_is_equally_likely_to_go_anywhere(size):
    trials = 2000
    counts = np.zeros((size, size))
    for seed in range(trials):
        counts[np.arange(size), permute(np.arange(size), size=size, key=(seed, 0, 0))] += 1
    expected = trials / size
    chi_squared = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert chi_squared < 1 + 5 * (2 / (size - 1) ** 2) ** 0.5


def test_all_orders_of_four_samples_occur():
    orders = {tuple(permute(np.arange(4), size=4, key=(seed,)).tolist()) for seed in range(400)}
    assert len(orders) == 24


def test_neighbors_do_not_stay_neighbors():
    order = permute(np.arange(100_000), size=100_000, key=(0,))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).sum() < 10
