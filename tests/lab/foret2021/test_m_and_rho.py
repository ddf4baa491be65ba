"""Figure 3, middle, on invented runs: what SAM gains with m, as a difference of differences."""

import math
import random

import numpy as np
import pytest

from flatmin.lab.foret2021.figures.m_and_rho import M_AND_RHO
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.contrasts import Contrast, Family, changes
from flatmin.lab.studies.findings import Comparison
from flatmin.lab.studies.registered_plan import plan_of
from flatmin.lab.studies.statistics import detectable_effect
from flatmin.lab.studies.study import describe, planned_jobs
from invented_runs import cells, invented_findings, invented_runs, only

GAINS = {4: 0.03, 16: 0.02, 64: 0.01, 128: 0.01}


def metrics(gains=None, unfit=(), best=0.5, spread=0.001):
    """SGD's error falls with m, as batch norm on few examples regularizes; SAM gains what is asked for on top."""

    def of(job):
        e, rng = job.experiment, random.Random(job.name)
        m, sam = e.optim.m or 128, e.optim.uses_sam
        error = 0.17 + 0.0001 * m + rng.gauss(0, spread) - (gains or GAINS)[m] * sam
        found = {"train_error": 0.03 * (m in unfit and not sam), "train_loss": 0.01, "test_error": error}
        found |= {"test_loss": 4 * error, "test_ece": error / 2}
        if not e.data.validation:
            return found
        return found | {"valid_error": 0.2 + 0.01 * abs(math.log2(e.optim.rho_number / best))}

    return of


def statuses(found):
    return [v.status for v in found.verdicts]


def test_every_m_has_sgd_by_the_same_micro_batches_and_sam_with_a_grid_in_units_of_the_suggestion():
    jobs = planned_jobs(M_AND_RHO, "laptop").values()
    for m in (4, 16, 64, None):
        own = [j for j in jobs if j.experiment.optim.m == m]
        assert sorted(j.seed for j in own if not j.experiment.optim.uses_sam) == [0, 1, 2, 3, 4]
        tried = {j.experiment.optim.rho for j in own if j.seed == TUNING_SEED}
        assert tried == {"0.125x", "0.25x", "0.5x", "auto", "2x"}
        assert len([j for j in own if j.experiment.optim.uses_sam and j.seed != TUNING_SEED]) == 5
    assert {(j.experiment.epochs, j.experiment.data.augment) for j in jobs} == {(50, "none")}


def test_the_plan_has_three_comparisons_of_the_papers_claim_and_six_of_ours():
    plan = plan_of(M_AND_RHO, "laptop")
    assert sum(text.endswith(" (ours)") for text in plan["comparisons"]) == 6
    assert [t for t in plan["comparisons"] if not t.endswith(" (ours)")] == [
        f"SAM's change of the test error: m = {m} vs. m = 128" for m in (4, 16, 64)
    ]
    assert plan["image_passes"] <= 8_000_000
    assert any("Power" in rule for rule in plan["rules"])


def test_a_smaller_m_gains_more_only_beyond_what_its_micro_batches_gain_alone():
    found = invented_findings(M_AND_RHO, "laptop", metrics())
    assert statuses(found)[:3] == ["reproduced", "reproduced", "inconclusive"]
    # With equal gains SAM with m = 4 still has by far the lowest error: batch norm's, not SAM's.
    alike = invented_findings(M_AND_RHO, "laptop", metrics(dict.fromkeys(GAINS, 0.02)))
    assert statuses(alike)[:3] == ["inconclusive"] * 3
    less = invented_findings(M_AND_RHO, "laptop", metrics({4: 0.0, 16: 0.02, 64: 0.02, 128: 0.03}))
    assert statuses(less)[0] == "not reproduced"


def test_the_difference_of_differences_is_of_the_four_runs_of_each_seed():
    known = invented_runs(M_AND_RHO, "laptop", metrics())
    comparison = cells(describe(M_AND_RHO, "laptop", known), Comparison)[0]
    errors = {}
    for record in known.values():
        if record.seed != TUNING_SEED:
            key = record.experiment.optim.m or 128, record.experiment.optim.uses_sam, record.seed
            errors[key] = 100 * record.metrics["test_error"]
    expected = np.array(
        [errors[4, True, s] - errors[4, False, s] - (errors[128, True, s] - errors[128, False, s]) for s in range(5)]
    )
    np.testing.assert_allclose(comparison.values, expected, atol=1e-9)
    half_width = 2.7764451 * expected.std(ddof=1) / math.sqrt(5)
    assert comparison.difference.mean == pytest.approx(expected.mean())
    assert comparison.difference.half_width == pytest.approx(half_width)
    assert len(comparison.runs) == 20
    assert math.isnan(comparison.baseline)  # a share of SAM's change, which may be 0, means nothing


def test_its_interval_and_power_are_those_of_the_closed_form():
    low, high = {0: -3.0, 1: -2.0, 2: -1.0}, {0: -1.0, 1: -1.0, 2: -1.0}
    contrast = Contrast(quantity="", lower_name="a", higher_name="b", lower=low, higher=high, num_asked=3)
    family = Family([contrast])
    # Differences -2, -1, 0: mean -1, s = 1, t = -sqrt(3), and P(|t| > sqrt(3)) with 2 degrees is 1 - sqrt(3/5).
    assert contrast.comparison(1.0).difference.half_width == pytest.approx(4.3026527 / math.sqrt(3))
    assert family.p_holm(contrast) == pytest.approx(1 - math.sqrt(3 / 5))
    # Of two independent differences the variances add.
    assert detectable_effect(0.8 * math.sqrt(2), 5) == pytest.approx(math.sqrt(2) * detectable_effect(0.8, 5))


def test_changes_are_of_seeds_that_both_have():
    assert changes({0: 5.0, 1: 6.0}, {1: 4.0, 2: 3.0}) == {1: -2.0}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"unfit": (64,)}, "SGD, m = 64 ends with a training error of 3.0 %, above 2 %"),
        ({"best": 1e-4}, "'s rho is at the edge of its grid"),
    ],
)
def test_a_baseline_that_does_not_fit_or_a_rho_at_the_edge_is_no_test(how, said):
    found = invented_findings(M_AND_RHO, "laptop", metrics(**how))
    closed = [v for v in found.verdicts if v.status == "not tested at this scale"]
    assert len(closed) == (3 if "unfit" in how else 9)
    assert all(v.evidence.startswith("Not a test of the claim at this scale: ") and said in v.evidence for v in closed)


def test_an_unfit_baseline_of_the_whole_batch_closes_the_gate_of_all():
    found = invented_findings(M_AND_RHO, "laptop", metrics(unfit=(128,)))
    assert set(statuses(found)) == {"not tested at this scale"}


def test_nothing_is_judged_while_a_replica_of_any_of_the_four_is_missing():
    lost = lambda job: not (job.experiment.optim.m == 4 and job.seed == 3 and not job.experiment.optim.uses_sam)  # noqa: E731
    found = invented_findings(M_AND_RHO, "laptop", only(lost, metrics()))
    assert statuses(found)[0] == "not tested"
    assert "no pair of runs" in found.verdicts[0].evidence
    assert statuses(found)[1] == "reproduced"  # whatever the first will say: it counts as not rejected
    assert {v.status for v in describe(M_AND_RHO, "laptop", Records()).verdicts} == {"not tested"}


def test_figures_show_errors_over_m_and_validation_errors_over_rho():
    over_m, over_rho = invented_findings(M_AND_RHO, "laptop", metrics()).figures
    assert [list(series.x) for series in over_m.series] == [[4, 16, 64, 128]] * 2
    assert [series.name for series in over_rho.series] == ["m = 4", "m = 16", "m = 64", "m = 128"]
    assert list(over_rho.series[0].x) == [0.125, 0.25, 0.5, 1.0, 2.0]
