"""Intervals and paired tests."""

import math

import numpy as np
import pytest
from scipy import stats

from flatmin.lab.studies.statistics import (
    Interval,
    detectable_effect,
    holm,
    mean_and_interval,
    p_text,
    paired_p_value,
)


def test_the_interval_is_students():
    """For (1, 2, 3): s = 1, n = 3, t_2(0.975) = 4.30265."""
    interval = mean_and_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert math.isnan(mean_and_interval([1.0]).half_width)


def test_an_interval_is_printed_with_half_its_width():
    assert str(Interval(14.7183, 0.3421)) == "14.7 ± 0.34"
    assert str(Interval(14.7183, math.nan)) == "14.7"


def test_the_paired_test_sees_differences_and_not_levels():
    """Differences (1, 2, 3): t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees of freedom, p = 0.0742."""
    assert paired_p_value([11.0, 102.0, 1003.0], [10.0, 100.0, 1000.0]) == pytest.approx(0.0741799, rel=1e-5)
    assert paired_p_value([1.0, 2.0], [1.0, 2.0]) == 1.0


def test_differences_that_are_equal_but_for_rounding_have_no_spread():
    """0.3 - 0.1 and 0.4 - 0.2 are one number on paper and two in a computer."""
    assert 0.3 - 0.1 != 0.4 - 0.2
    assert math.isnan(paired_p_value([0.3, 0.4], [0.1, 0.2]))
    assert paired_p_value([0.1 + 0.2, 0.4], [0.3, 0.4]) == 1.0


def test_differences_that_only_rounding_tells_apart_are_equal():
    """Two more errors of 500 in both replicas: float32 means of them differ in the eighth digit."""
    first, second = np.float32([0.892, 0.890]), np.float32([0.896, 0.894])
    assert math.isnan(paired_p_value(100 * first.astype(float), 100 * second.astype(float)))
    assert paired_p_value([0.3, 0.1 + 0.2], [0.1 + 0.2, 0.3]) == 1.0
    assert math.isnan(paired_p_value([0.0, 0.0], [0.3, 0.1 + 0.2]))
    assert math.isnan(paired_p_value([0.3, 0.1 + 0.2], [0.0, 0.0]))


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.02], [0.02, 0.02]),
        ([0.04, 0.001, 0.02], [0.04, 0.003, 0.04]),
        # 2 * 0.03 = 0.06 is above 1 * 0.04: the running maximum holds it up.
        ([0.04, 0.03], [0.06, 0.06]),
        ([0.6, 0.7, 0.5], [1.0, 1.0, 1.0]),
        # A test that was planned and not made counts as not rejected: as if its p-value were 1.
        ([0.01, math.nan, 0.02], [0.03, math.nan, 0.04]),
        ([math.nan, math.nan], [math.nan, math.nan]),
    ],
)
def test_holms_correction_by_hand(p_values, adjusted):
    assert holm(p_values) == pytest.approx(adjusted, nan_ok=True)


@pytest.mark.parametrize("seed", range(5))
def test_holm_keeps_the_order_lowers_nothing_and_lies_below_bonferroni(seed):
    p = np.random.default_rng(seed).uniform(0, 0.2, size=9)
    adjusted = np.array(holm(p.tolist()))
    assert np.all(np.diff(adjusted[np.argsort(p)]) >= 0)
    assert np.all(adjusted >= p)
    assert np.all(adjusted <= np.minimum(1, 9 * p))
    assert adjusted.min() == pytest.approx(9 * p.min())


@pytest.mark.parametrize(
    ("p_value", "shown"),
    [(0.05, "p = 0.050"), (0.001, "p = 0.001"), (0.0009, "p < 0.001"), (math.nan, "no test")],
)
def test_p_values_have_three_decimals_and_are_never_0(p_value, shown):
    assert p_text(p_value) == shown


@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_detectable_effect_is_shown_by_four_of_five_simulated_studies(num_pairs):
    """20,000 studies: the share with p < 0.05 has a standard error of 0.003."""
    spread = 2.5
    shape = (20_000, num_pairs)
    differences = np.random.default_rng(num_pairs).normal(detectable_effect(spread, num_pairs), spread, shape)
    p_values = stats.ttest_1samp(differences, 0.0, axis=1).pvalue
    assert np.mean(p_values < 0.05) == pytest.approx(0.8, abs=0.012)


def test_detectable_effect_for_many_pairs_is_that_of_the_normal_distribution():
    """(1.95996 + 0.84162) / sqrt(n) standard deviations."""
    assert detectable_effect(1.0, 10_000) == pytest.approx((1.959964 + 0.841621) / 100, rel=1e-3)
