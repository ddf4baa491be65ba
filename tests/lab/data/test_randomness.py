"""Random numbers made of keys."""

import numpy as np

from flatmin.lab.data.randomness import Purpose, hashed, integers, permutation, uniform


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
