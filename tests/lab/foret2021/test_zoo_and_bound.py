"""Predictive power and the bound on invented runs with known numbers: what is said of them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from flatmin.lab.foret2021.figures import predictive
from flatmin.lab.foret2021.figures.predictive import PGDL, ZOOS, better_predictor, zoo_jobs
from flatmin.lab.foret2021.items import ITEMS
from invented_runs import invented_findings, only


def zoo(sharpness_of, num_stuck=0, gap=None, keep=lambda job: True):
    """A zoo whose test errors are all different, in no order of the hyperparameters."""
    rng = np.random.default_rng(1)
    order = rng.permutation(48) if gap is None else gap
    number = {job.name: n for n, job in enumerate(zoo_jobs("laptop"))}

    def metrics(job):
        n = number[job.name]
        return {"train_loss": 0.3 if n < num_stuck else 0.04, "train_error": 0.0, "test_error": 0.1 + 0.001 * order[n]}

    def facts(job, measurement):
        return {"m_sharpness": float(sharpness_of(measurement.m, order[number[job.name]], rng))}

    return invented_findings(ITEMS["predictive"], "laptop", only(keep, metrics), facts)


def scores(found):
    return {row[0]: row[1].measured.mean for row in found.tables[0].rows}


def test_a_measure_that_orders_the_zoo_scores_1_and_noise_does_not():
    found = zoo(lambda m, gap, rng: math.exp(gap) if m == 1 else rng.normal())
    assert scores(found)["1"] == pytest.approx(1.0)
    assert scores(found)["n"] < 0.3
    assert found.verdicts[0].status == "reproduced"
    assert "48 models" in found.verdicts[0].evidence
    assert list(scores(found)) == ["1", "4", "16", "64", "256", "n"]
    assert list(found.figures[0].series[0].x) == [1, 4, 16, 64, 256, 1000]


@pytest.fixture
def two_measures(monkeypatch):
    """A zoo that is measured for m = 1 and m = n alone, and a coarser test: quicker."""
    monkeypatch.setattr(predictive, "NUM_SWAPS", 49)
    monkeypatch.setitem(ZOOS, "laptop", replace(ZOOS["laptop"], m_values=(1,)))


@pytest.mark.usefixtures("two_measures")
def test_the_claim_holds_only_if_small_m_predicts_better_and_in_the_right_order():
    better = zoo(lambda m, gap, rng: gap if m is None else rng.normal())
    assert (better.verdicts[0].status, scores(better)["n"]) == ("not reproduced", pytest.approx(1.0))
    alike = zoo(lambda m, gap, rng: gap)
    assert alike.verdicts[0].status == "inconclusive"
    wrong = zoo(lambda m, gap, rng: -gap if m == 1 else rng.normal())
    assert scores(wrong)["1"] > 0.8  # a tie counts as "not larger": not quite 1
    assert wrong.verdicts[0].status == "not reproduced"
    assert "wrong way round" in wrong.verdicts[0].evidence


@pytest.mark.usefixtures("two_measures")
@pytest.mark.parametrize(
    ("sharpness", "num_stuck", "num_counted", "said"),
    [
        # The first five would spoil the order of the others.
        (lambda m, gap, rng: 1000.0 - gap if gap < 5 else gap, 5, 43, "43 models of 48 are counted; 5 did not come to"),
        (lambda m, gap, rng: math.inf if gap < 3 and m == 1 else gap, 0, 45, "3 more have a sharpness that is not fin"),
    ],
)
def test_models_that_do_not_reach_the_loss_or_have_no_finite_sharpness_are_left_out_and_counted(
    sharpness, num_stuck, num_counted, said
):
    found = zoo(sharpness, num_stuck, gap=[*range(48)])
    assert any(said in note for note in found.notes)
    assert scores(found)["1"] == pytest.approx(1.0)
    assert all(len(series.x) == num_counted for series in found.figures[1].series)


@pytest.mark.usefixtures("two_measures")
def test_no_score_means_too_few_models_and_nothing_else(monkeypatch):
    first = zoo_jobs("laptop")[0].name
    (verdict,) = zoo(lambda m, gap, rng: gap, keep=lambda job: job.name == first).verdicts
    assert verdict.status == "not tested"
    assert verdict.evidence.startswith("47 models of the zoo are missing")
    stuck = zoo(lambda m, gap, rng: gap, num_stuck=47)
    assert stuck.verdicts[0].evidence == "Too few models are available to score a measure."

    def refuse(*_):
        raise ValueError("another mistake")

    monkeypatch.setattr(predictive, "predictive_power", refuse)
    with pytest.raises(ValueError, match="another mistake"):
        zoo(lambda m, gap, rng: gap)


def test_the_zoo_is_a_grid_of_48_models_each_stopped_at_the_same_loss():
    jobs = zoo_jobs("laptop")
    specs = [job.experiment for job in jobs]
    grid = {(e.model.name, e.optim.lr, e.data.batch_size, e.optim.weight_decay) for e in specs}
    axes = [set(values) for values in zip(*grid, strict=True)]
    assert len(jobs) == len(grid) == math.prod(map(len, axes)) == 48
    assert axes[0] == {"wrn-10-1", "wrn-10-2", "wrn-16-1", "wrn-16-2"}
    assert {e.stop_loss for e in specs} == {0.05}
    assert {tuple(m.m for m in job.measurements) for job in jobs} == {(1, 4, 16, 64, 256, None)}


def test_the_papers_scale_of_predictive_power_says_that_it_needs_the_competitions_models():
    found = invented_findings(ITEMS["predictive"], "paper", None)
    assert (found.num_missing, list(found.runs), found.verdicts[0].status) == (0, [], "not tested")
    assert PGDL in found.notes


def test_swapping_ranks_finds_a_difference_only_where_there_is_one():
    grid = list(itertools.product(range(2), range(4), range(4)))
    rng = np.random.default_rng(0)
    gaps = rng.permutation(32).tolist()
    noise = rng.normal(size=32).tolist()
    assert better_predictor(gaps, noise, gaps, grid) < 0.01
    assert better_predictor(gaps, gaps, gaps, grid) == 1.0
    assert better_predictor(noise, rng.normal(size=32).tolist(), gaps, grid) > 0.05


TERMS = ("error", "sharp_error", "complexity", "weight_term", "confidence_term", "union_term")


def bound(total=lambda rho: 2.0, proof=0.1, half_width=0.0005, keep=lambda job: True):
    """The bound as a function of its rho, and by how much noise at the scale of the proof raises the error."""

    def facts(job, measurement):
        if measurement.kind == "noise":
            rises = {"stated": 0.7, "proof": proof}
            return {scale: {"rise": rise, "half_width": half_width} for scale, rise in rises.items()}
        value = total(measurement.rho)
        return dict.fromkeys((*TERMS, "weight_norm", "num_weights"), 1.0) | {"total": value, "vacuous": value > 1}

    return invented_findings(ITEMS["bound"], "laptop", only(keep, lambda job: {"test_error": 0.2}), facts)


@pytest.mark.parametrize(
    ("total", "held"),
    [
        (lambda rho: 10 / rho, "inconclusive"),
        (lambda rho: 0.4 / rho, "reproduced"),  # some of them are below 1
        (lambda rho: 0.1, "not reproduced"),
    ],
)
def test_a_vacuous_bound_tests_nothing(total, held):
    found = bound(total)
    verdict, _ = found.verdicts
    assert verdict.status == held
    rows = {row[0]: row for row in found.tables[0].rows}
    assert rows["bound: the last two"][1].measured.mean == pytest.approx(total(0.2))
    assert rows["vacuous (above 1)"][1] == f"{5 * (total(0.2) > 1)} of 5"
    assert rows["test error"][2].measured.mean == pytest.approx(0.2)
    assert ("60 of 60" in verdict.evidence) == (held == "inconclusive")


@pytest.mark.parametrize(
    ("proof", "half_width", "held"),
    [
        (0.02, 0.001, "reproduced"),
        (0.0, 0.0005, "reproduced"),  # a fall of 0.001 counts as nothing
        (0.0, 0.01, "inconclusive"),  # it may fall by more
        (-0.02, 0.01, "not reproduced"),
    ],
)
def test_noise_may_not_lower_the_error_at_any_of_its_two_scales(proof, half_width, held):
    found = bound(proof=proof, half_width=half_width)
    _, verdict = found.verdicts
    assert verdict.status == held
    falls = 10 if held == "not reproduced" else 0  # of ten models
    assert f"in {falls} of 20 measurements" in verdict.evidence
    stated, _, at_proof, widths = found.tables[1].rows
    assert (stated[1].measured.mean, at_proof[2].measured.mean) == pytest.approx((0.7, proof))
    assert float(widths[1]) == pytest.approx(half_width)


def test_the_condition_is_not_judged_while_a_model_is_missing():
    _, verdict = bound(keep=lambda job: job.seed > 0).verdicts
    assert verdict.status == "not tested"
