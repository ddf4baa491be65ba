"""Figure 3, right, on invented runs: which models count, what is said of m, and what the training loss takes away."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import kendalltau, rankdata

from flatmin.lab.foret2021.figures import prediction
from flatmin.lab.foret2021.figures.prediction import better_predictor
from flatmin.lab.foret2021.figures.predictive import PGDL, PREDICTIVE
from flatmin.lab.foret2021.figures.zoo import SEEDS, laptop_settings, members, zoo_experiment
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.registered_plan import plan_of
from flatmin.lab.studies.study import describe, planned_jobs
from flatmin.measures import predictive_power
from invented_runs import invented_findings, invented_runs, only

NUMBERS = {zoo_experiment("laptop", s).run_hash(): n for n, s in enumerate(laptop_settings())}
ORDER = np.random.default_rng(1).permutation(96)


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(prediction, "NUM_RESAMPLES", 99)


def number(job):
    return NUMBERS[job.experiment.run_hash()]


def gap(job):
    """In the mean over both seeds ORDER decides; one seed alone is far off."""
    return 0.1 + 0.001 * ORDER[number(job)] + 0.05 * (2 * job.seed - 1)


def metrics(loss=lambda job: 0.05, lr=0.1, gap=gap):
    def of(job):
        found = {"fit_loss": loss(job), "fit_error": 0.01, "train_loss": 9.0, "train_error": 0.5}
        return found | {"test_error": 0.01 + gap(job), "lr": lr * job.experiment.optim.lr}

    return of


def facts(sharpness):
    rng = np.random.default_rng(2)
    return lambda job, m: {"m_sharpness": float(sharpness(job, m.m, rng))}


def found_in(sharpness, keep=lambda job: True, **how):
    return invented_findings(PREDICTIVE, "laptop", only(keep, metrics(**how)), facts(sharpness))


def small_m_knows(job, m, rng):
    return math.exp(ORDER[number(job)] / 50) if m == 1 else rng.normal()


def rows(found):
    return {row[0]: [float(x) if x else None for x in row[1:]] for row in found.tables[0].rows}


def test_the_grid_has_96_settings_in_which_every_two_values_meet_equally_often():
    grid = [s.values for s in laptop_settings()]
    assert len(set(grid)) == 96
    assert len({h[:6] for h in grid}) == 32
    for first, second in itertools.combinations(range(7), 2):
        meetings = Counter((h[first], h[second]) for h in grid)
        assert len(set(meetings.values())) == 1
        assert len(meetings) == len({h[first] for h in grid}) * len({h[second] for h in grid})


def test_the_plan_trains_two_seeds_of_each_within_the_budget_and_measures_each_m_with_its_own_radius():
    jobs = planned_jobs(PREDICTIVE, "laptop").values()
    assert len(jobs) == 192
    assert Counter(job.seed for job in jobs) == {0: 96, 1: 96}
    assert {job.experiment.target_loss for job in jobs} == {0.05}
    assert {tuple(m.m for m in job.measurements) for job in jobs} == {(1, 4, 16, 64, 256, None)}
    radii = [m.rho for m in next(iter(jobs)).measurements]
    assert radii == sorted(radii)
    plan = plan_of(PREDICTIVE, "laptop")
    assert plan["image_passes"] <= 8_000_000
    assert len(plan["comparisons"]) == 2
    assert sum(len(group["varies"]) for group in plan["groups"].values()) == 192


def test_seeds_are_averaged_before_anything_is_ranked():
    found = found_in(small_m_knows)
    assert rows(found)["1"] == pytest.approx([1.0] * 4)
    known = invented_runs(PREDICTIVE, "laptop", metrics(loss=lambda j: 0.046 + 0.006 * j.seed), facts(small_m_knows))
    counted = members("laptop", known)
    assert [m.gap for m in counted] == pytest.approx((10 + 0.1 * ORDER).tolist())
    assert {round(m.loss, 12) for m in counted} == {0.049}
    assert all(len(m.runs) == len(SEEDS) for m in counted)


def test_a_measure_that_orders_the_zoo_scores_1_noise_does_not_and_the_loss_is_in_the_same_table_and_plot():
    found = found_in(small_m_knows, loss=lambda job: 0.045 + 0.0001 * ((7 * number(job)) % 96))
    assert list(rows(found)) == ["1", "4", "16", "64", "256", "n", "training loss"]
    assert rows(found)["n"][0] < 0.1
    assert [v.status for v in found.verdicts] == ["reproduced", "reproduced"]
    assert "96 settings" in found.verdicts[0].evidence
    plot = found.figures[0]
    assert [series.name for series in plot.series][:3] == ["m-sharpness", "m-sharpness, adjusted", "training loss"]
    assert list(plot.series[0].x) == [1, 4, 16, 64, 256, 500]
    assert len(found.figures[1].series[0].x) == 96


def test_a_trend_that_is_the_losses_own_is_gone_when_the_loss_is_taken_out():
    """The gap follows the loss, and so does sharpness with m = 1: it tells nothing more."""
    loss = lambda job: 0.0455 + 0.00009 * ORDER[number(job)]  # noqa: E731
    noise = np.random.default_rng(3).normal(size=(96, 2))

    def sharpness(job, m, rng):
        return loss(job) + 0.0004 * noise[number(job), 0] if m == 1 else rng.normal()

    own = lambda job: 0.2 + 0.002 * ORDER[number(job)] + 0.004 * noise[number(job), 1]  # noqa: E731
    found = found_in(sharpness, loss=loss, gap=own)
    assert [v.status for v in found.verdicts] == ["reproduced", "inconclusive"]
    score, adjusted, tau, tau_adjusted = rows(found)["1"]
    assert score > 0.5 > 0.1 > adjusted
    assert tau > 0.8 > 0.3 > abs(tau_adjusted)
    assert rows(found)["training loss"][0] > score


def test_the_claim_holds_only_if_small_m_predicts_better_and_in_the_right_order():
    better = found_in(lambda job, m, rng: ORDER[number(job)] if m is None else rng.normal())
    assert {v.status for v in better.verdicts} == {"not reproduced"}
    alike = found_in(lambda job, m, rng: ORDER[number(job)])
    assert {v.status for v in alike.verdicts} == {"inconclusive"}
    wrong = found_in(lambda job, m, rng: -float(ORDER[number(job)]) if m == 1 else rng.normal())
    assert {v.status for v in wrong.verdicts} == {"not reproduced"}
    assert "wrong way round" in wrong.verdicts[0].evidence


@pytest.mark.parametrize(
    ("how", "outside"),
    [
        ({"loss": lambda job: 0.0449 if (number(job), job.seed) == (3, 1) else 0.05}, 1),  # jumped over the band
        ({"loss": lambda job: 0.0551 if number(job) == 3 else 0.05}, 2),  # did not reach it
        ({"loss": lambda job: 0.045 if number(job) == 3 else 0.055}, 0),  # its edges belong to it
    ],
)
def test_a_setting_counts_only_if_both_of_its_models_stop_in_the_band(how, outside):
    found = found_in(small_m_knows, **how)
    counted = 96 - bool(outside)
    assert any(f"{counted} settings of 96 count; of 192 models {outside} did not stop" in note for note in found.notes)


def test_a_model_whose_learning_rate_has_not_decayed_or_whose_sharpness_is_not_finite_does_not_count():
    early = found_in(small_m_knows, lr=0.3)
    assert any("0 settings of 96 count; of 192 models 192 did not" in note for note in early.notes)
    assert {v.evidence for v in early.verdicts} == {"Too few settings count to score a measure."}
    endless = found_in(lambda job, m, rng: math.inf if number(job) < 3 and m == 1 else small_m_knows(job, m, rng))
    assert any("93 settings of 96 count; of 192 models 6 did not" in note for note in endless.notes)


def test_with_fewer_than_72_settings_nothing_is_tested():
    found = found_in(small_m_knows, loss=lambda job: 0.05 if number(job) < 71 else 0.2)
    assert {v.status for v in found.verdicts} == {"not tested at this scale"}
    assert "71 settings count, fewer than 72" in found.verdicts[0].evidence
    enough = found_in(small_m_knows, loss=lambda job: 0.05 if number(job) < 72 else 0.2)
    assert {v.status for v in enough.verdicts} == {"reproduced"}


def test_nothing_is_judged_before_all_models_are_there():
    found = found_in(small_m_knows, keep=lambda job: (number(job), job.seed) != (5, 1))
    assert {v.status for v in found.verdicts} == {"not tested"}
    assert found.verdicts[0].evidence.startswith("1 models of the zoo are missing")
    nothing = describe(PREDICTIVE, "laptop", Records())
    assert {v.status for v in nothing.verdicts} == {"not tested"}
    assert (nothing.num_missing, len(nothing.tables)) == (192, 0)


def test_the_null_and_both_tests_have_at_least_5000_resamples():
    import importlib

    assert importlib.reload(prediction).NUM_RESAMPLES >= 5000


def test_swapping_ranks_finds_a_difference_only_where_there_is_one_as_a_slow_loop_does(monkeypatch):
    grid = list(itertools.product(range(2), range(4), range(4)))
    rng = np.random.default_rng(0)
    gaps = rng.permutation(32).tolist()
    noise, half = rng.normal(size=32).tolist(), (np.array(gaps) + rng.normal(scale=12, size=32)).tolist()
    assert better_predictor(gaps, noise, gaps, grid) == 0.01
    assert better_predictor(gaps, gaps, gaps, grid) == 1.0

    def score(values):
        return predictive_power(values, gaps, grid, permutations=1).score

    one, two = rankdata(half), rankdata(noise)
    observed, swaps = abs(score(one) - score(two)), np.random.default_rng(0).random((99, 32)) < 0.5
    swapped = [abs(score(np.where(s, two, one)) - score(np.where(s, one, two))) for s in swaps]
    assert better_predictor(half, noise, gaps, grid) == (1 + sum(d >= observed - 1e-12 for d in swapped)) / 100


def test_the_adjusted_tau_is_kendalls_of_what_two_lines_leave():
    rng = np.random.default_rng(5)
    known = invented_runs(
        PREDICTIVE, "laptop", metrics(loss=lambda j: 0.046 + 0.00008 * number(j)), facts(lambda j, m, r: rng.normal())
    )
    counted = members("laptop", known)
    found = prediction.predict(counted, adjust=True)
    loss, own, gaps = (rankdata(x) for x in zip(*((m.loss, m.sharpness[1], m.gap) for m in counted), strict=True))
    left = [y - np.polyval(np.polyfit(loss, y, 1), loss) for y in (own, gaps)]
    assert found.predictors[1].tau == pytest.approx(kendalltau(*left).statistic, abs=1e-9)


def test_the_papers_scale_says_that_it_needs_the_competitions_models():
    found = invented_findings(PREDICTIVE, "paper", None)
    assert (found.num_missing, list(found.runs), found.verdicts[0].status) == (0, [], "not tested")
    assert PGDL in found.notes
