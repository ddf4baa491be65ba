"""Random numbers made of keys, label noise and the validation split."""

import numpy as np
import pytest

from flatmin.lab.data.label_noise import noisy_labels, subset, validation_split
from flatmin.lab.data.randomness import Purpose, hashed, integers, permutation, uniform


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.8, 1.0])
def test_exactly_the_rate_is_flipped_and_every_flipped_label_is_wrong(rate):
    labels = np.arange(50_000) % 10
    new, flipped = noisy_labels(labels, rate, 10, seed=0)
    assert len(flipped) == round(rate * len(labels))
    assert np.array_equal(np.flatnonzero(new != labels), flipped)
    assert new.min() >= 0
    assert new.max() <= 9


def test_a_flipped_label_is_uniform_over_the_other_classes():
    """Chi squared of the transition counts, 10 x 9 cells, is below its 99.9 % quantile (80 degrees of freedom)."""
    labels = np.arange(100_000) % 10
    new, flipped = noisy_labels(labels, 0.4, 10, seed=1)
    counts = np.zeros((10, 10))
    np.add.at(counts, (labels[flipped], new[flipped]), 1)
    assert (np.diag(counts) == 0).all()
    rows = counts.sum(1, keepdims=True)
    expected = np.repeat(rows / 9, 10, axis=1)
    cells = ~np.eye(10, dtype=bool)
    chi_squared = (((counts - expected) ** 2) / expected)[cells].sum()
    assert chi_squared < 124.8


def test_noise_is_seeded():
    labels = np.arange(1000) % 10
    same = [noisy_labels(labels, 0.4, 10, seed=3)[0] for _ in range(2)]
    assert np.array_equal(*same)
    assert not np.array_equal(same[0], noisy_labels(labels, 0.4, 10, seed=4)[0])


def test_the_split_is_a_seeded_partition_of_the_asked_size():
    train, valid = validation_split(1000, 0.1, seed=0)
    assert len(valid) == 100
    assert sorted([*train, *valid]) == list(range(1000))
    assert not np.array_equal(valid, validation_split(1000, 0.1, seed=1)[1])
    assert len(validation_split(1000, 0.0, seed=0)[1]) == 0


def test_smaller_subsets_are_parts_of_larger_ones():
    assert set(subset(1000, 10, 0)) < set(subset(1000, 100, 0))
    assert len(subset(1000, 100, 0)) == 100


def test_the_numbers_are_those_of_splitmix64_on_every_machine():
    """The first output of SplitMix64 seeded with 0 is 0xE220A8397B1DCDAF; the rest is pinned from it."""

    def splitmix64(x):
        mask = 2**64 - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    assert splitmix64(0) == 0xE220A8397B1DCDAF
    expected = splitmix64(splitmix64(splitmix64(7) ^ splitmix64(int(Purpose.FLIP))) ^ splitmix64(3))
    assert int(hashed(7, Purpose.FLIP, 3)) == expected


def test_a_number_depends_on_every_key_and_not_on_its_neighbors():
    alone = uniform(1, Purpose.FLIP, 2, np.array([5]))
    among = uniform(1, Purpose.FLIP, 2, np.array([9, 5, 3]))
    assert alone[0] == among[1]
    others = [uniform(0, Purpose.FLIP, 2, 5), uniform(1, Purpose.ORDER, 2, 5), uniform(1, Purpose.FLIP, 3, 5)]
    assert all(alone[0] != other for other in others)


def test_the_numbers_are_uniform_and_uncorrelated():
    u = uniform(3, Purpose.FLIP, np.arange(200_000))
    assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / len(u))
    counts = np.bincount((u * 20).astype(int), minlength=20)
    chi_squared = ((counts - len(u) / 20) ** 2 / (len(u) / 20)).sum()
    assert chi_squared < 43.8  # 99.9 % of chi squared with 19 degrees of freedom
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(len(u))
    v = uniform(4, Purpose.FLIP, np.arange(200_000))
    assert abs(np.corrcoef(u, v)[0, 1]) < 4 / np.sqrt(len(u))


def test_integers_and_permutations_are_what_they_say():
    drawn = integers(7, 0, Purpose.FLIP, np.arange(1000))
    assert set(drawn.tolist()) == set(range(7))
    order = permutation(1000, 0, Purpose.ORDER, 4)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() != list(range(1000))
