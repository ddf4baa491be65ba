"""Intervals and paired tests."""

import math

import pytest

from flatmin.lab.statistics import mean_and_interval, paired_p_value


def test_the_interval_is_students():
    """For (1, 2, 3): s = 1, n = 3, t_2(0.975) = 4.30265."""
    interval = mean_and_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert math.isnan(mean_and_interval([1.0]).half_width)


def test_the_paired_test_sees_differences_and_not_levels():
    """Differences (1, 2, 3): t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees of freedom, p = 0.0742."""
    assert paired_p_value([11.0, 102.0, 1003.0], [10.0, 100.0, 1000.0]) == pytest.approx(0.0741799, rel=1e-5)
    assert paired_p_value([1.0, 2.0], [1.0, 2.0]) == 1.0
