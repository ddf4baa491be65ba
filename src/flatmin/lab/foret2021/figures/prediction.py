"""How well several numbers predict the generalization gap of the same models, also adjusted for the training loss."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from flatmin.lab.foret2021.figures.zoo import Member
from flatmin.lab.studies.statistics import rank_residuals
from flatmin.measures import predictive_power
from flatmin.measures.predictive import predictive_scores

NUM_RESAMPLES = 5000
"""Of the test whether one measure predicts better than another, and of the range of a shuffled measure."""
LOSS = "training loss"


@dataclass(frozen=True)
class Predictor:
    """How well one number predicts the gap."""

    values: Sequence[float]
    score: float
    tau: float


@dataclass(frozen=True)
class Prediction:
    """Predictors of one gap over the same settings."""

    gaps: Sequence[float]
    grid: Sequence[tuple[float | str, ...]]
    """The hyperparameters of each setting."""
    predictors: Mapping[int | str | None, Predictor]
    """By m (None: n); and the training loss."""
    null: tuple[float, float]
    """The 2.5 and 97.5 % quantiles of the score of a shuffled measure."""

    def p_value(self) -> float:
        """Return the p-value that the smallest m and m = n predict equally well."""
        one, two = self.predictors[smallest_m(self.predictors)], self.predictors[None]
        return better_predictor(one.values, two.values, self.gaps, self.grid)


def predict(found: Sequence[Member], adjust: bool) -> Prediction | None:
    """Score all predictors; None where no two settings share two hyperparameters and differ in the gap, so far."""
    losses = [member.loss for member in found]
    grid = [member.setting.values for member in found]

    def of(values: Sequence[float]) -> list[float]:
        return rank_residuals(values, losses) if adjust else list(values)

    gaps = of([member.gap for member in found])
    if not can_score(gaps, grid):
        return None
    predictors: dict[int | str | None, Predictor] = {}
    numbers: dict[int | str | None, list[float]] = {
        m: [member.sharpness[m] for member in found] for m in found[0].sharpness
    }
    for key, values in (numbers | ({} if adjust else {LOSS: losses})).items():
        own = of(values)
        score = predictive_power(own, gaps, grid, permutations=1)
        predictors[key] = Predictor(own, score.score, score.kendall_tau)
    # All measures share the null of a random order.
    null = predictive_power(range(len(found)), gaps, grid, permutations=NUM_RESAMPLES)
    return Prediction(gaps, grid, predictors, (null.null_low, null.null_high))


def can_score(gaps: Sequence[float], grid: Sequence[tuple[float | str, ...]]) -> bool:
    """Return whether two settings share two hyperparameters and differ in the gap: there is something to predict."""
    gaps_of: dict[tuple[object, ...], set[float]] = {}
    for gap, h in zip(gaps, grid, strict=True):
        for first, second in itertools.combinations(range(len(h)), 2):
            gaps_of.setdefault((first, second, h[first], h[second]), set()).add(gap)
    return any(len(of_cell) > 1 for of_cell in gaps_of.values())


def better_predictor(
    first: Sequence[float], second: Sequence[float], gaps: Sequence[float], grid: Sequence[tuple[float | str, ...]]
) -> float:
    """Return the two-sided p-value that two measures predict the gap equally well.

    If they do, it does not matter which of the two ranks of a model belongs to which measure: they are swapped at
    random, model by model, and the difference of the scores is compared with the differences after swapping.
    """
    ranks = np.stack([scipy.stats.rankdata(first), scipy.stats.rankdata(second)])
    swaps = np.random.default_rng(0).random((NUM_RESAMPLES, len(gaps))) < 0.5
    ones, twos = (np.where(swaps, ranks[i], ranks[1 - i]) for i in (1, 0))
    observed, *swapped = np.abs(
        predictive_scores(np.vstack([ranks[0], ones]), gaps, grid)
        - predictive_scores(np.vstack([ranks[1], twos]), gaps, grid)
    )
    return float(1 + np.sum(np.array(swapped) >= observed - 1e-12)) / (1 + NUM_RESAMPLES)


def smallest_m(keys: Mapping[int | str | None, object] | Mapping[int | None, object]) -> int:
    """Return the smallest m of predictors."""
    return min(m for m in keys if isinstance(m, int))
