"""Means over replicas with confidence intervals, and paired comparisons (the paper's protocol, Section 3.1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SIGNIFICANT = 0.05
"""The level of all tests, after Holm's correction where there are several."""
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


def mean_and_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    r"""Return the mean and :math:`t_{n-1} s / \sqrt n`, Student's interval.

    Example:
        >>> mean_and_interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, half_width=2.4841...)
    """
    n = len(values)
    if n < 2:
        return Interval(float(values[0]), math.nan)
    quantile = float(stats.t.ppf((1 + confidence) / 2, n - 1))
    return Interval(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / math.sqrt(n))


def paired_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t-test.

    Where all differences are 0 it is 1. Where they are equal otherwise it is NaN: no spread over a few replicas, of
    errors that are multiples of one example, does not make a difference certain.
    """
    differences = np.subtract(first, second)
    rounding = ROUNDING * max(np.abs(first).max(), np.abs(second).max())
    if np.ptp(differences) <= rounding:  # no spread but that of float32 means: the test is not defined
        return 1.0 if abs(differences[0]) <= rounding else math.nan
    return float(stats.ttest_rel(first, second).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    r"""Return Holm's step-down adjusted p-values, in the given order.

    With :math:`p_{(1)} \le \dots \le p_{(k)}`, the adjusted one is :math:`\max_{j \le i} \min(1, (k - j + 1) p_{(j)})`
    (Holm, 1979): those at most alpha are rejected with a family-wise error of at most alpha. A NaN (a test that could
    not be made) stays NaN and does not count.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)[: np.count_nonzero(~np.isnan(p))]  # NaN are sorted to the end
    adjusted = np.full(len(p), math.nan)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(len(order), 0, -1)))
    return [float(value) for value in adjusted]


def p_text(p_value: float) -> str:
    """Return a p-value as text; NaN is a test that cannot be made.

    Example:
        >>> p_text(0.01234), p_text(1e-5), p_text(float("nan"))
        ('p = 0.012', 'p < 0.001', 'no test')
    """
    if math.isnan(p_value):
        return "no test"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
