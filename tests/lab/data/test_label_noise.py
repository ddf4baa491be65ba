"""Label noise and the validation split."""

import numpy as np
import pytest

from flatmin.lab.data.label_noise import noisy_labels, subset, validation_split


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
