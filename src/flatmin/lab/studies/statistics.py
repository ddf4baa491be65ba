"""Means over replicas with confidence intervals, and paired comparisons (the paper's protocol, Section 3.1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # modules are imported when they are used: scipy.stats takes a second

SIGNIFICANT = 0.05
"""The level of all tests, after Holm's correction where there are several."""
POWER = 0.8
"""The probability with which a test is to show what `detectable_effect` names."""
ROUNDING = 1e-6
"""Relative: what is less apart is equal, as error rates of equally many examples often are."""


@dataclass(frozen=True)
class Interval:
    """A mean over replicas and half the width of its confidence interval (NaN for one replica)."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        alone = f"{self.mean:.3g}"
        return alone if math.isnan(self.half_width) else f"{alone} ± {self.half_width:.2g}"


def mean_and_interval(values: Sequence[float]) -> Interval:
    r"""Return the mean and :math:`t_{n-1} s / \sqrt n`, Student's interval.

    Example:
        >>> mean_and_interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, half_width=2.4841...)
    """
    n = len(values)
    if n < 2:
        return Interval(float(values[0]), math.nan)
    return Interval(float(np.mean(values)), _quantile(n) * float(np.std(values, ddof=1)) / math.sqrt(n))


def paired_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t-test.

    Where all differences are 0 it is 1. Where they are equal otherwise it is NaN: no spread over a few replicas, of
    errors that are multiples of one example, does not make a difference certain.
    """
    differences = np.subtract(first, second)
    rounding = ROUNDING * max(np.abs(first).max(), np.abs(second).max())
    if np.ptp(differences) <= rounding:  # no spread but the rounding of float32 means: the test is not defined
        return 1.0 if abs(differences[0]) <= rounding else math.nan
    return float(scipy.stats.ttest_rel(first, second).pvalue)


def interval_p_value(mean: float, half_width: float, n: int) -> float:
    r"""Return the two-sided p-value of Student's test that a mean of n draws is 0, by its 95 % confidence interval.

    Example:
        >>> round(interval_p_value(-0.3, 0.3, n=20), 4), interval_p_value(0.0, 0.3, n=20)
        (0.05, 1.0)
    """
    if half_width == 0:
        return math.nan if mean else 1.0
    return 2 * float(scipy.stats.t.sf(abs(mean) / half_width * _quantile(n), n - 1))


def _quantile(n: int) -> float:
    return float(scipy.stats.t.ppf(1 - SIGNIFICANT / 2, n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    r"""Return Holm's step-down adjusted p-values, in the given order.

    With :math:`p_{(1)} \le \dots \le p_{(k)}`, the adjusted one is :math:`\max_{j \le i} \min(1, (k - j + 1) p_{(j)})`
    (Holm, 1979): those at most alpha are rejected with a family-wise error of at most alpha. A NaN (a test that was
    planned and not made) stays NaN and counts as a 1: as one of the k, and not rejected.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)  # NaN are sorted to the end, as a 1 would be
    adjusted = np.full(len(p), math.nan)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(len(p), 0, -1)))
    return [float(value) for value in adjusted]


def detectable_effect(spread: float, num_pairs: int) -> float:
    r"""Return the smallest mean difference that a paired test shows with a probability of 80 %.

    Student's t-test, two-sided, at the level `SIGNIFICANT`, without a correction for several tests. With n pairs whose
    differences have the standard deviation s, t has a noncentral distribution with the parameter
    :math:`\delta \sqrt n / s`; :math:`\delta` is where :math:`P(|t| > t_{n-1, 0.975})` is that probability.

    Args:
        spread: s, the standard deviation of the differences.
        num_pairs: n, at least 2.

    Example:
        >>> round(detectable_effect(spread=1.0, num_pairs=5), 2), round(detectable_effect(spread=1.0, num_pairs=10), 2)
        (1.68, 1.0)
    """
    df = num_pairs - 1
    critical = float(scipy.stats.t.isf(SIGNIFICANT / 2, df))

    def surplus(nc: float) -> float:
        return float(scipy.stats.nct.sf(critical, df, nc)) - POWER  # the other tail has less than a millionth

    return float(scipy.optimize.brentq(surplus, 0.0, 2 * critical + 2)) * spread / math.sqrt(num_pairs)


def rank_residuals(values: Sequence[float], given: Sequence[float]) -> list[float]:
    r"""Return what the ranks of a number keep when another is known: the residuals of a line through both ranks.

    With ranks :math:`r` and :math:`s`, :math:`r - \bar r - \beta (s - \bar s)`, where :math:`\beta` is their slope:
    as in the partial rank correlation. Ties have their mean rank; a ``given`` that is constant explains nothing.

    Example:
        >>> rank_residuals([1.0, 5.0, 3.0], [0.1, 0.3, 0.2]), rank_residuals([1.0, 3.0, 2.0], [5.0, 5.0, 5.0])
        ([0.0, 0.0, 0.0], [-1.0, 1.0, 0.0])
    """
    ranks, others = (scipy.stats.rankdata(x) - (len(x) + 1) / 2 for x in (values, given))
    spread = float(others @ others)
    slope = float(ranks @ others) / spread if spread else 0.0
    # What is equal up to rounding is a tie: the score counts pairs.
    return [float(value) + 0.0 for value in np.round(ranks - slope * others, 9)]


def p_text(p_value: float) -> str:
    """Return a p-value as text; NaN is a test that cannot be made.

    Example:
        >>> p_text(0.01234), p_text(1e-5), p_text(float("nan"))
        ('p = 0.012', 'p < 0.001', 'no test')
    """
    if math.isnan(p_value):
        return "no test"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
