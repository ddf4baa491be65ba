"""Intervals and paired tests; from runs to evidence: pairs by seed, Holm's correction, and what is said of a claim."""

import math

import numpy as np
import pytest
from scipy import stats

from flatmin.lab.runs.record import RunRecord
from flatmin.lab.studies.contrasts import Contrast, Family
from flatmin.lab.studies.replicas import Replicas
from flatmin.lab.studies.statistics import (
    Interval,
    detectable_effect,
    holm,
    mean_and_interval,
    p_text,
    paired_p_value,
    rank_residuals,
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


def test_differences_that_only_rounding_tells_apart_are_equal():
    """0.3 - 0.1 and 0.4 - 0.2 are one number on paper; float32 means of errors differ in the eighth digit."""
    assert 0.3 - 0.1 != 0.4 - 0.2
    assert math.isnan(paired_p_value([0.3, 0.4], [0.1, 0.2]))
    assert paired_p_value([0.1 + 0.2, 0.4], [0.3, 0.4]) == 1.0
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


def contrast(lower, higher, num_asked=1):
    names = {"quantity": "error, %", "lower_name": "SAM", "higher_name": "SGD"}
    return Contrast(**names, lower=lower, higher=higher, num_asked=num_asked)


def with_p(p, sign=-1):
    """A contrast of five pairs whose differences have the given sign and p-value, by Student's t of a known spread."""
    spread = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    shift = sign * stats.t.isf(p / 2, 4) * stats.sem(spread)
    return contrast(dict(enumerate(50 + spread + shift)), dict.fromkeys(range(5), 50.0))


def judge(claim, contrasts):
    return Family(contrasts).judge(claim, contrasts)


ONE_PAIR = contrast({0: 1.0}, {0: 2.0})


def run(seed, *errors):
    """A run with a test error after each epoch; without any it is missing."""
    history = [{"epoch": epoch, "test_error": error} for epoch, error in enumerate(errors, start=1)]
    return RunRecord(name=f"seed{seed}", state="finished" if errors else "missing", seed=seed, history=history)


def test_pairs_are_those_of_the_seeds_that_both_have():
    """Seeds 0 and 2, in another order: 4 against 7, and 1 against 2."""
    found = contrast({0: 4.0, 1: 2.0, 2: 1.0}, {3: 9.0, 2: 2.0, 0: 7.0})
    assert found.differences == [-3.0, -1.0]
    assert found.p_value == pytest.approx(stats.ttest_rel([4.0, 1.0], [7.0, 2.0]).pvalue)
    assert found.describe(0.3).startswith("error, %: 2.5 (SAM) vs. 4.5 (SGD); difference -2 ± ")
    asked_for_three = contrast(found.lower, found.higher, num_asked=3)
    assert math.isnan(asked_for_three.p_value)
    assert asked_for_three.describe(math.nan).endswith("2 of 3 pairs are available, nothing is judged before all are")
    assert math.isnan(ONE_PAIR.p_value)
    assert ONE_PAIR.describe(math.nan).endswith("n = 1, too few for a test")


@pytest.mark.parametrize(
    ("contrasts", "held"),
    [
        ([with_p(0.04)], "reproduced"),
        ([with_p(0.06)], "inconclusive"),
        ([with_p(0.04, sign=1)], "not reproduced"),
        ([with_p(0.01), with_p(0.04)], "reproduced"),
        # Holm makes 0.06 of both.
        ([with_p(0.03), with_p(0.04)], "inconclusive"),
        ([with_p(0.001), with_p(0.5)], "inconclusive"),
        ([with_p(0.001), with_p(0.001, sign=1)], "not reproduced"),
        ([with_p(0.001), ONE_PAIR], "not tested"),
        ([with_p(0.001, sign=1), ONE_PAIR], "not reproduced"),
        ([], "not tested"),
    ],
)
def test_a_claim_holds_where_all_its_contrasts_do_after_holms_correction(contrasts, held):
    assert judge("It is lower.", contrasts).status == held


WAITING = contrast({}, {}, num_asked=5)


@pytest.mark.parametrize(
    ("p_values", "num_waiting", "statuses"),
    [
        # Three planned, one there: significant only if it is after the correction for three.
        ([0.01], 2, ["reproduced"]),
        ([0.02], 2, ["not tested"]),  # 0.06 now; 0.02 if the other two have smaller p-values
        ([0.06], 2, ["inconclusive"]),  # whatever comes
        ([0.01, 0.02], 1, ["reproduced", "reproduced"]),
        ([0.01, 0.03], 1, ["reproduced", "not tested"]),
        ([0.03, 0.04], 1, ["inconclusive", "inconclusive"]),  # 2 * 0.03 even if the third is 0
        ([0.02], 0, ["reproduced"]),
    ],
)
def test_missing_comparison_of_the_family_counts_as_not_rejected(p_values, num_waiting, statuses):
    there = [with_p(p) for p in p_values]
    family = Family([*there, *[WAITING] * num_waiting])
    assert [family.status(c) for c in there] == statuses
    assert family.status(WAITING) == "not tested" if num_waiting else True
    for c, status in zip(there, statuses, strict=True):
        said = f"open until the {num_waiting} missing ones are available" in family.judge("It is lower.", [c]).evidence
        assert said == (status == "not tested")


def test_no_verdict_changes_as_runs_arrive():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        contrasts = [with_p(p, sign=rng.choice([-1, 1])) for p in 10 ** rng.uniform(-4, -1, size=6)]
        order = rng.permutation(6)
        known = {}
        for num_there in range(7):
            there = set(order[:num_there].tolist())
            family = Family([c if n in there else WAITING for n, c in enumerate(contrasts)])
            for n in there:
                status = family.status(contrasts[n])
                assert known.get(n, "not tested") in ("not tested", status), seed
                known[n] = status
        assert "not tested" not in known.values()


def test_verdict_has_the_numbers_it_was_judged_by():
    """Effect, interval, baseline, pairs and both p-values, for every contrast with a pair."""
    verdict = judge("It is lower.", [with_p(0.01), with_p(0.04), contrast({0: 1.0}, {1: 1.0})])
    first, second = verdict.comparisons
    assert (first.p_value, first.p_holm, second.p_holm) == pytest.approx((0.01, 0.03, 0.08))
    assert (first.baseline, first.quantity, first.num_pairs) == (50.0, "error, %", 5)
    assert first.difference.mean == pytest.approx(-stats.t.isf(0.005, 4) * stats.sem([-2, -1, 0, 1, 2]))


def test_comparisons_are_corrected_together():
    two_of_three = contrast({0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0}, num_asked=3)
    contrasts = [with_p(0.04), with_p(0.03, sign=1), contrast({0: 1.0}, {1: 1.0}), two_of_three]
    first, second, none, too_few = map(Family(contrasts).comparison, contrasts)
    assert (first.p_value, second.p_value) == pytest.approx((0.04, 0.03))
    assert (first.p_holm, second.p_holm) == pytest.approx((0.12, 0.12))
    assert first.name == "SAM - SGD"
    assert first.difference.mean < 0 < second.difference.mean
    assert first.num_pairs == len(first.values) == 5
    assert none == too_few == ""


def test_numbers_are_in_percent_and_those_that_are_not_finite_are_left_out():
    replicas = Replicas("SAM", [run(0, 0.5, 0.25), run(1, math.inf), run(2), run(3, 0.5, 0.75)])
    assert replicas.by_seed("test_error") == {0: 25.0, 3: 75.0}
    cell = replicas.cell("test_error")
    assert cell.values == (25.0, 75.0)
    assert cell.measured.mean == 50.0
    assert cell.runs == ("seed0", "seed3")


def test_curves_are_means_over_replicas_in_percent():
    replicas = Replicas("SAM", [run(0, 0.5, 0.25), run(1, 0.75, 0.25)])
    (series,) = replicas.along_training("test error", lambda line: line["test_error"])
    assert series.name == "test error"
    assert (series.x, series.y) == ([1.0, 2.0], [62.5, 25.0])
    assert series.half_width == pytest.approx([stats.t.ppf(0.975, 1) * stats.sem([50.0, 75.0]), 0.0])
    (alone,) = Replicas("SAM", [run(0, 0.2)]).along_training("SAM", lambda line: line["test_error"])
    assert math.isnan(alone.half_width[0])  # one replica has no interval, not one of width 0


def test_baseline_of_a_comparison_is_the_mean_over_its_pairs_and_none_for_a_difference_from_nothing():
    assert contrast({0: 4.0, 2: 1.0}, {3: 9.0, 2: 2.0, 0: 7.0}).comparison(0.5).baseline == 4.5
    gains = {0: -8.0, 1: -9.0, 2: -10.0}
    assert math.isnan(contrast(dict.fromkeys(gains, 0.0), gains).comparison(p_holm=0.01).baseline)


@pytest.mark.parametrize("untestable", [True, False])
def test_a_comparison_that_is_no_test_counts_in_the_family_and_nothing_waits_for_it(untestable):
    """By itself p is below 5 %, and in a family of three it is not; with two that may still come it would be open."""
    differences = dict(enumerate([-1.0, -1.5, -0.2, -1.2, -0.4]))
    names = {"lower_name": "SAM", "higher_name": "SGD", "num_asked": 5}
    one = Contrast(quantity="a", lower=differences, higher=dict.fromkeys(differences, 0.0), **names)
    assert 0.05 / 3 < one.p_value < 0.05
    why = "a run never gets there" if untestable else ""
    others = [Contrast(quantity=q, lower={}, higher={}, untestable=why, **names) for q in "bc"]
    family = Family([one, *others])
    assert family.p_holm(one) == pytest.approx(3 * one.p_value)
    assert family.status(one) == ("inconclusive" if untestable else "not tested")
    assert ("open until" in family.judge("It holds.", [one]).evidence) != untestable
    other = family.judge("It holds.", [others[0]])
    assert other.status == ("not tested at this scale" if untestable else "not tested")
    assert not other.comparisons
    assert (other.evidence == "b: not a test at this scale: a run never gets there.") == untestable
    both = family.judge("It holds.", [one, others[0]])
    assert both.status == other.status


def test_what_is_left_of_ranks_is_what_least_squares_leaves():
    rng = np.random.default_rng(0)
    values, given = np.round(rng.normal(size=20), 1), np.round(rng.normal(size=20), 1)  # with ties
    ranks, others = stats.rankdata(values), stats.rankdata(given)
    design = np.stack([np.ones(20), others], axis=1)
    expected = ranks - design @ np.linalg.lstsq(design, ranks, rcond=None)[0]
    left = rank_residuals(values, given)
    np.testing.assert_allclose(left, expected, atol=1e-8)
    assert np.dot(left, others) == pytest.approx(0.0, abs=1e-6)
    assert rank_residuals(np.exp(values), given) == left  # only the order counts


def test_a_number_that_rises_or_falls_with_the_other_leaves_nothing_and_a_constant_takes_nothing():
    x = [3.0, 1.0, 2.0, 5.0]
    assert rank_residuals([v**3 for v in x], x) == [0.0] * 4
    assert rank_residuals([-v for v in x], x) == [0.0] * 4
    assert rank_residuals(x, [7.0] * 4) == [0.5, -1.5, -0.5, 1.5]


def test_a_comparison_whose_gate_is_closed_shows_its_numbers_and_makes_no_other_claim_easier_to_show():
    """Its p-value is the smallest; counted as rejected it would leave a factor of 2 for the next, not of 3."""
    clear, next_one, last = with_p(0.001), with_p(0.02), with_p(0.5)
    closed = clear.gated(["SGD does not fit", None, "rho is at the edge"])
    assert clear.gated([None]) == clear
    family = Family([closed, next_one, last])
    assert family.p_holm(next_one) == pytest.approx(3 * 0.02)
    assert Family([clear, next_one, last]).p_holm(next_one) == pytest.approx(2 * 0.02)
    verdict = family.judge("It is lower.", [closed])
    assert verdict.status == "not tested at this scale"
    assert verdict.evidence.startswith(
        "Not a test of the claim at this scale: SGD does not fit; rho is at the edge. error"
    )
    (shown,) = verdict.comparisons
    assert shown.p_value == pytest.approx(0.001)
    assert math.isnan(shown.p_holm)
    assert shown.difference == mean_and_interval(clear.differences)
    assert family.judge("Both are.", [closed, closed]).evidence.count("SGD does not fit") == 1
