import itertools
import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from flatmin.measures import predictive_power
from flatmin.measures.predictive import predictive_scores

GRID = list(itertools.product((0.1, 0.2), ("a", "b"), (1, 2, 3)))


def entropy(values):
    """Plain Shannon entropy, in bits, of a list of outcomes."""
    return -sum(values.count(v) / len(values) * math.log2(values.count(v) / len(values)) for v in set(values))


def conditional(measure, gap, hyperparameters, chosen):
    """I(V_mu; V_g | U) / H(V_g | U) from lists of outcomes, one cell of U at a time, all cells alike."""
    cells = {}
    for i, j in itertools.product(range(len(measure)), repeat=2):
        key = tuple((hyperparameters[i][c], hyperparameters[j][c]) for c in chosen)
        cells.setdefault(key, []).append((measure[i] > measure[j], gap[i] > gap[j]))
    information = [
        entropy([a for a, _ in pairs]) + entropy([b for _, b in pairs]) - entropy(pairs) for pairs in cells.values()
    ]
    uncertainty = [entropy([b for _, b in pairs]) for pairs in cells.values()]
    return np.mean(information) / np.mean(uncertainty)


def random_case(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=12).tolist(), rng.normal(size=12).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_score_is_the_smallest_conditional_information_over_pairs_of_hyperparameters(seed):
    measure, gap = random_case(seed)
    found = predictive_power(measure, gap, GRID)
    for chosen, value in found.per_set.items():
        assert value == pytest.approx(conditional(measure, gap, GRID, chosen), rel=1e-9)
    assert set(found.per_set) == {(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)}
    pairs = [conditional(measure, gap, GRID, c) for c in ((0, 1), (0, 2), (1, 2))]
    assert found.score == pytest.approx(min(pairs), rel=1e-9)
    assert found.kendall_tau == pytest.approx(kendalltau(measure, gap).statistic)
    assert found.num_models == 12


def test_a_perfect_measure_scores_one_and_so_does_its_opposite():
    _, gap = random_case(3)
    assert predictive_power(gap, gap, GRID).score == pytest.approx(1.0)
    found = predictive_power([-g for g in gap], gap, GRID)
    assert found.kendall_tau == pytest.approx(-1.0)
    # Ties of a model with itself are "not larger" on both sides, so that a reversed measure misses those.
    assert 0.4 < found.score < 1.0


def test_a_measure_that_only_knows_one_hyperparameter_scores_low():
    """The gap is hyperparameter 2 plus noise, and the measure is hyperparameter 2; a constant knows nothing."""
    rng = np.random.default_rng(0)
    gap = [h[2] + 0.1 * rng.normal() for h in GRID]
    found = predictive_power([h[2] for h in GRID], gap, GRID)
    assert found.per_set[()] > 0.5
    assert found.score < 0.05
    with np.errstate(all="ignore"):
        assert predictive_power([1.0] * 12, gap, GRID).score == pytest.approx(0.0, abs=1e-12)


def test_the_null_holds_95_percent_of_shuffled_measures():
    measure, gap = random_case(5)
    found = predictive_power(measure, gap, GRID, permutations=200, seed=9)
    scores = []
    rng = np.random.default_rng(9)
    for _ in range(40):
        order = rng.permutation(12)
        shuffled = [measure[i] for i in order]
        scores.append(min(conditional(shuffled, gap, GRID, c) for c in ((0, 1), (0, 2), (1, 2))))
    inside = np.mean([(found.null_low <= s) & (s <= found.null_high) for s in scores])
    assert inside > 0.8
    assert 0 <= found.null_low < np.median(scores) < found.null_high <= 1


def test_the_null_is_the_score_of_shuffled_measures():
    """One shuffle for all sets of hyperparameters, as the score has one measure for all."""
    measure, gap = random_case(3)
    rng = np.random.default_rng(5)
    scores = [predictive_power(rng.permutation(measure), gap, GRID, permutations=1).score for _ in range(50)]
    found = predictive_power(measure, gap, GRID, permutations=50, seed=5)
    assert (found.null_low, found.null_high) == pytest.approx(tuple(np.quantile(scores, [0.025, 0.975])))


def test_the_bias_of_few_models_shows_in_the_null():
    """With 8 models a shuffled measure scores 0.26 on average, with 32 close to nothing."""
    small = list(itertools.product((0, 1), repeat=3))
    large = list(itertools.product((0, 1), repeat=5))
    rng = np.random.default_rng(0)
    few = predictive_power(rng.normal(size=8), rng.normal(size=8), small)
    many = predictive_power(rng.normal(size=32), rng.normal(size=32), large)
    assert few.null_high > 0.3
    assert many.null_high < 0.1


def test_the_same_seed_gives_the_same_null():
    measure, gap = random_case(7)
    assert predictive_power(measure, gap, GRID, seed=1) == predictive_power(measure, gap, GRID, seed=1)
    assert predictive_power(measure, gap, GRID, seed=1) != predictive_power(measure, gap, GRID, seed=2)


def test_with_one_hyperparameter_the_sets_have_one():
    measure, gap = random_case(8)
    one = [(h[0],) for h in GRID]
    found = predictive_power(measure, gap, one)
    assert found.score == pytest.approx(conditional(measure, gap, one, (0,)), rel=1e-9)


@pytest.mark.parametrize(
    ("measure", "gap", "hyperparameters", "settings", "message"),
    [
        ([1.0, 2.0], [1.0], [(0,), (1,)], {}, "must have one entry for each model, got 2, 1 and 2"),
        ([1.0], [1.0], [(0,)], {}, "at least two models, got 1"),
        ([1.0, math.nan], [1.0, 2.0], [(0,), (0,)], {}, "measure must be finite, got nan"),
        ([1.0, 2.0], [1.0, math.inf], [(0,), (0,)], {}, "gap must be finite, got inf"),
        ([1.0, 2.0], [1.0, 2.0], [(0,), (0, 1)], {}, r"tuples of one length, got lengths \[1, 2\]"),
        ([1.0, 2.0], [1.0, 2.0], [(0,), (0,)], {"permutations": 0}, "permutations must be at least 1, got 0"),
        ([1.0, 2.0], [1.0, 2.0], [(0, 1), (1, 0)], {}, "leave nothing to predict"),
    ],
)
def test_bad_input_is_refused_by_name(measure, gap, hyperparameters, settings, message):
    with pytest.raises(ValueError, match=message):
        predictive_power(measure, gap, hyperparameters, **settings)


def test_a_plot_shows_the_score():
    measure, gap = random_case(9)
    assert "12 models" in predictive_power(measure, gap, GRID).plot().axes[0].get_title()


@pytest.mark.parametrize("hyperparameters", [[{"a": 0}, {"a": 1}], ["ab", "cd"], [1, 2]])
def test_hyperparameters_that_are_no_tuples_are_refused(hyperparameters):
    with pytest.raises(TypeError, match="one tuple of values for each model"):
        predictive_power([1.0, 2.0], [1.0, 2.0], hyperparameters)


def test_many_measures_at_once_score_as_one_by_one_ties_included():
    rng = np.random.default_rng(4)
    measures = np.round(rng.normal(size=(130, 12)), 1)
    gap = np.round(rng.normal(size=12), 1)
    one_by_one = [predictive_power(row, gap, GRID, permutations=1).score for row in measures]
    np.testing.assert_allclose(predictive_scores(measures, gap, GRID), one_by_one, rtol=0, atol=1e-12)
