r"""Random numbers that depend only on what they are for: a seed, an epoch, an example, a purpose.

A generator that is advanced gives different images after a resume or with another number of workers. Here
each number is a hash of its key, :math:`h_0 = f(seed)`, :math:`h_{i+1} = f(h_i \oplus f(key_i))` with
SplitMix64's finalizer :math:`f` (Steele et al., 2014), computed for whole arrays of keys at once and the same
on every machine and with every version of numpy.
"""

import enum

import numpy as np
from numpy.typing import NDArray

Keys = int | NDArray[np.integer]


class Purpose(enum.IntEnum):
    """What a random number decides; the values are part of the format."""

    VALIDATION = 1
    SUBSET = 2
    NOISE_WHICH = 3
    NOISE_LABEL = 4
    ORDER = 5
    FLIP = 6
    CROP_ROW = 7
    CROP_COLUMN = 8
    CUTOUT_ROW = 9
    CUTOUT_COLUMN = 10
    POLICY = 11
    POLICY_APPLIED = 12
    POLICY_SIGN = 13
    MIXUP_PARTNER = 14
    MIXUP_WEIGHT = 15
    RESIZED_CROP = 16
    NETWORK_INIT = 17
    NETWORK_NOISE = 18
    DIGITS_TEST = 19
    PERTURBATION = 20
    SECOND_STAGE = 21


def hashed(seed: int, purpose: Purpose, *keys: Keys) -> NDArray[np.uint64]:
    """Return 64 random bits for each element of the keys, which are broadcast against each other.

    Example:
        >>> hashed(0, Purpose.FLIP, 3, np.arange(4)).shape
        (4,)
    """
    bits = _finalize(np.asarray(seed, dtype=np.uint64))
    for key in (int(purpose), *keys):
        bits = _finalize(bits ^ _finalize(np.asarray(key).astype(np.uint64)))
    return bits


def uniform(seed: int, purpose: Purpose, *keys: Keys) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each element of the keys."""
    return (hashed(seed, purpose, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(below: int, seed: int, purpose: Purpose, *keys: Keys) -> NDArray[np.int64]:
    """Return an integer in [0, below) for each element of the keys."""
    return (uniform(seed, purpose, *keys) * below).astype(np.int64)


def permutation(size: int, seed: int, purpose: Purpose, *keys: Keys) -> NDArray[np.int64]:
    """Return the numbers 0 .. size - 1 in random order: sorted by their hashes."""
    return np.argsort(hashed(seed, purpose, *keys, np.arange(size)), kind="stable").astype(np.int64)


def torch_seed(seed: int, purpose: Purpose, *keys: int) -> int:
    """Return a seed for a torch generator."""
    return int(hashed(seed, purpose, *keys) >> np.uint64(1))


def _finalize(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))
