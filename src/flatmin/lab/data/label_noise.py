"""Symmetric label noise (Section 3.3) and the clean validation split (Section 3.1)."""

import numpy as np
from numpy.typing import NDArray

from flatmin.lab.data.randomness import Purpose, integers, permutation

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]


def validation_split(size: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Return the indices of the training and of the validation examples, both in ascending order.

    Example:
        >>> train, valid = validation_split(1000, 0.1, seed=0)
        >>> len(train), len(valid)
        (900, 100)
    """
    order = permutation(size, seed, Purpose.VALIDATION)
    num_valid = round(fraction * size)
    return np.sort(order[num_valid:]), np.sort(order[:num_valid])


def subset(size: int, count: int, seed: int) -> Indices:
    """Return ``count`` random indices, ascending; smaller subsets are parts of larger ones."""
    return np.sort(permutation(size, seed, Purpose.SUBSET)[:count])


def noisy_labels(labels: Labels, rate: float, num_classes: int, seed: int) -> tuple[Labels, Indices]:
    r"""Replace exactly :math:`round(rate \cdot n)` labels, each by one of the other classes, uniformly.

    A flipped label is therefore always wrong, and a rate of 0.8 with ten classes leaves 20 % of the labels
    right. (Some authors draw from all classes, which leaves 28 % right; the paper says "flipped".)

    Args:
        labels: the true classes.
        rate: the fraction to replace, in [0, 1].
        num_classes: the number of classes, at least 2 where the rate is not 0.
        seed: which labels are replaced, and by what.

    Returns:
        The new labels, and the indices of the replaced ones in ascending order.

    Example:
        >>> new, flipped = noisy_labels(np.zeros(10, dtype=np.int64), 0.4, 2, seed=0)
        >>> int(new.sum()), len(flipped)
        (4, 4)
    """
    flipped = np.sort(permutation(len(labels), seed, Purpose.NOISE_WHICH)[: round(rate * len(labels))])
    new = labels.copy()
    shift = 1 + integers(num_classes - 1, seed, Purpose.NOISE_LABEL, flipped)
    new[flipped] = (labels[flipped] + shift) % num_classes
    return new, flipped
