r"""How well a measure predicts the generalization gap (Section 4.1; Jiang et al., 2019)."""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from flatmin.measures import plots

Set = tuple[int, ...]
MEASURES_AT_ONCE = 128
"""Rows that are compared at once: memory."""


@dataclass(frozen=True)
class Score:
    """How well a measure predicts the gap."""

    score: float
    """The competition's, in [0, 1]: the smallest of ``per_set`` over the sets of two hyperparameters."""
    null_low: float
    """The 2.5 % quantile of the score when the measure is shuffled among the models."""
    null_high: float
    """The 97.5 % quantile; a score below it is not evidence."""
    kendall_tau: float
    """The rank correlation of the measure and the gap, in [-1, 1]; it keeps the sign."""
    per_set: dict[Set, float]
    """The normalized conditional mutual information for every set of at most two hyperparameters, by their positions;
    NaN where the set leaves nothing to predict. Their smallest is the score of Jiang et al. (2019)."""
    num_models: int
    """How many models it is from."""

    def plot(self) -> "plots.Figure":
        """Return a matplotlib figure of every set's information, the score and the permutation null."""
        return plots.score(self)


def predictive_power(
    measure: Sequence[float],
    gap: Sequence[float],
    hyperparameters: Sequence[Sequence[Hashable]],
    *,
    permutations: int = 200,
    seed: int = 0,
) -> Score:
    r"""Score a measure as the NeurIPS 2020 competition on predicting generalization did.

    Of all ordered pairs of models let :math:`V_\mu` be whether the measure is larger for the first,
    :math:`V_g` whether the gap is, and :math:`U_S` the values of the hyperparameters S in both. The score is

    .. math:: \min_{|S| = 2} \frac{I(V_\mu; V_g \mid U_S)}{H(V_g \mid U_S)}

    A measure that only reflects one or two hyperparameters scores low. As in the competition's
    program, a model is paired with itself too, a tie counts as "not larger", and every value of :math:`U_S`
    weighs the same (in a full grid all have as many pairs). Jiang et al. (2019) take the minimum over smaller
    sets as well: see ``per_set``.

    The score has a large bias for few models: compare it with the permutation null. It is blind to the
    direction: a measure that orders all models the wrong way round scores 1 as well, with a Kendall's tau of
    -1.

    Args:
        measure: of each model.
        gap: the generalization gap of each model.
        hyperparameters: one tuple for each model, all of one length; a grid, with several models for each
            pair of values.
        permutations: how often to shuffle the measure for the null.
        seed: of the shuffling.

    Raises:
        ValueError: if the lengths differ, a number is not finite, or no set leaves anything to predict.

    Example:
        >>> grid = list(itertools.product((0, 1), (0, 1), (0, 1)))
        >>> gap = [1.0, 2.0, 4.0, 3.0, 5.0, 6.0, 8.0, 7.0]
        >>> result = predictive_power([g**2 for g in gap], gap, grid)
        >>> round(result.score, 6), round(result.kendall_tau, 6)
        (1.0, 1.0)
    """
    mu, g = np.asarray(measure, dtype=float), np.asarray(gap, dtype=float)
    from scipy.stats import kendalltau  # imported when used: SciPy takes a second to import

    cells = _check(mu, g, hyperparameters, permutations)
    per_set = dict(zip(cells, _informations(mu[None], g, list(cells.values()))[:, 0].tolist(), strict=True))
    scored = [chosen for chosen in cells if len(chosen) == max(map(len, cells)) and not math.isnan(per_set[chosen])]
    if not scored:
        raise ValueError(
            "hyperparameters leave nothing to predict: no two models share the values of two of them. Train several "
            "models for each pair of values (other hyperparameters, or seeds as one of them)."
        )
    rng = np.random.default_rng(seed)
    shuffles = np.stack([rng.permutation(mu) for _ in range(permutations)])  # as the score, one measure for all sets
    null = _informations(shuffles, g, [cells[s] for s in scored]).min(axis=0)
    low, high = np.quantile(null, [0.025, 0.975])
    tau = float(kendalltau(mu, g).statistic)
    return Score(min(per_set[s] for s in scored), float(low), float(high), tau, per_set, len(mu))


def predictive_scores(
    measures: np.ndarray, gap: Sequence[float], hyperparameters: Sequence[Sequence[Hashable]]
) -> np.ndarray:
    """Return the ``score`` of `predictive_power` of each row of ``measures``: many at once, for tests by resampling.

    Example:
        >>> grid = list(itertools.product((0, 1), (0, 1), (0, 1)))
        >>> gap = [1.0, 2.0, 4.0, 3.0, 5.0, 6.0, 8.0, 7.0]
        >>> predictive_scores(np.array([gap, [0.0] * 8]), gap, grid).round(6).tolist()
        [1.0, 0.0]
    """
    rows, g = np.atleast_2d(np.asarray(measures, dtype=float)), np.asarray(gap, dtype=float)
    cells = _check(rows[0], g, hyperparameters, permutations=1)
    found = _informations(rows, g, [cell for chosen, cell in cells.items() if len(chosen) == max(map(len, cells))])
    return np.asarray(found[~np.isnan(found[:, 0])].min(axis=0))


def _informations(measures: np.ndarray, g: np.ndarray, cells: Sequence[np.ndarray]) -> np.ndarray:
    """Return I(V_mu; V_g | U) / H(V_g | U) over all ordered pairs: a row for each U, a column for each measure.

    ``cells`` has the cell of each pair, for each U.
    """
    from scipy.sparse import csr_array

    larger_gap = (g[:, None] > g).ravel()
    found = np.empty((len(cells), len(measures)))
    counters = []
    for cell in cells:
        group = 2 * cell.ravel() + larger_gap  # a cell, and whether the gap is larger
        shape = 2 * (int(cell.max()) + 1), len(group)
        counts = np.ones(len(group), dtype=np.float32)  # which holds any number of pairs below 2^24 exactly
        counters.append(csr_array((counts, (group, np.arange(len(group)))), shape=shape))
    for start in range(0, len(measures), MEASURES_AT_ONCE):
        some = measures[start : start + MEASURES_AT_ONCE]
        larger = (some[:, :, None] > some[:, None, :]).reshape(len(some), -1).T.astype(np.float32, order="C")
        for row, counter in zip(found, counters, strict=True):
            # Of each cell, by V_g: pairs of a larger measure.
            ones = (counter @ larger).astype(float).reshape(-1, 2, len(some))
            total = np.asarray(counter.sum(axis=1)).reshape(-1, 2, 1)
            joint = np.stack([total - ones, ones], axis=2) / total.sum(axis=1)[:, None, None]  # cell, V_g, V_mu
            of_gap, of_measure = joint.sum(axis=2), joint.sum(axis=1)
            entropies = [_entropy(p).mean(axis=0) for p in (of_gap, of_measure, joint.reshape(len(joint), 4, -1))]
            information = entropies[0] + entropies[1] - entropies[2]
            row[start : start + len(some)] = information / entropies[0] if entropies[0][0] > 0 else math.nan
    return found


def _entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy over the second axis, in bits."""
    return np.asarray(-np.sum(p * np.log2(np.where(p > 0, p, 1.0)), axis=1))


def _check(
    mu: np.ndarray, g: np.ndarray, hyperparameters: Sequence[Sequence[Hashable]], permutations: int
) -> dict[Set, np.ndarray]:
    """Return the cell of each ordered pair of models, for every set of at most two hyperparameters."""
    if not (mu.ndim == g.ndim == 1 and len(mu) == len(g) == len(hyperparameters)):
        raise ValueError(
            f"measure, gap and hyperparameters must have one entry for each model, got {len(mu)}, {len(g)} and "
            f"{len(hyperparameters)}."
        )
    if len(mu) < 2:
        raise ValueError(f"measure must be of at least two models, got {len(mu)}.")
    for name, values in (("measure", mu), ("gap", g)):
        if not np.all(np.isfinite(values)):
            raise ValueError(f"{name} must be finite, got {values[~np.isfinite(values)][0]} for a model.")
    for given in hyperparameters:
        if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
            raise TypeError(
                f"hyperparameters must have one tuple of values for each model, such as (0.1, 128), got {given!r}."
            )
    lengths = {len(values) for values in hyperparameters}
    if len(lengths) != 1:
        raise ValueError(f"hyperparameters must be tuples of one length, got lengths {sorted(lengths)}.")
    if permutations < 1:
        raise ValueError(
            f"permutations must be at least 1, got {permutations!r}: the score means little without a null."
        )
    num = lengths.pop()
    cells = {}
    for size in range(min(num, 2) + 1):
        for chosen in itertools.combinations(range(num), size):
            kinds: dict[tuple[Hashable, ...], int] = {}
            label = np.array([kinds.setdefault(tuple(h[i] for i in chosen), len(kinds)) for h in hyperparameters])
            cells[chosen] = label[:, None] * len(kinds) + label
    return cells
