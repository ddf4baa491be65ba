"""Figure 3, left: curvature at equal training loss, on invented runs with known numbers."""

import numpy as np
import pytest

from flatmin.lab.foret2021.figures.hessian import AT_LOSS, LIMITS
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.studies.findings import Comparison
from flatmin.lab.studies.registered_plan import plan_of
from flatmin.lab.sweeps.spectrum_at_loss import SpectrumAtLoss
from invented_runs import cells, invented_findings, only, wobble

HESSIAN = ITEMS["hessian"]
END = len(LIMITS)
"""The number of the verdict on the end of training: after one for each loss."""


def method_of(job):
    return job.experiment.name.split("/")[2]


def own(job):
    """A deviation of each run: the pairs of SGD and SAM spread."""
    return wobble(job.seed + (method_of(job) == "SAM"))


def metrics(job):
    return {"test_error": 0.1, "train_loss": 0.01, "train_error": 0.0, "rho": 0.14}


def spectrum(largest, ratio):
    return {"lambda_max": largest, "lambda_1_over_lambda_5": ratio, "converged": True}


def facts(at_loss, at_end=lambda job: (1.0, 3.0), never=lambda job, limit: False):
    """Return measurements: lambda_max and its ratio at a loss, and at the end, times 10 to each run's deviation."""

    def found(job, measurement):
        factor = 10 ** own(job)
        if not isinstance(measurement, SpectrumAtLoss):
            largest, ratio = at_end(job)
            density = {"nodes": [0.0, largest], "weights": [0.9, 0.1], "epoch": job.experiment.epochs}
            return spectrum(largest * factor, ratio * factor) | density
        at = {}
        for limit in measurement.limits:
            largest, ratio = at_loss(job, limit)
            here = {"epoch": 7, "loss": 0.9 * limit} | spectrum(largest * factor, ratio * factor)
            at[f"{limit:g}"] = None if never(job, limit) else here
        return {"losses": [1.0, 0.01], "keep_every": 1, "at_loss": at}

    return found


def sam_is(factor, limits=LIMITS):
    """Return lambda_max and ratio: SAM's is a multiple of SGD's at some losses, and as large at others."""

    def at_loss(job, limit):
        here = method_of(job) == "SAM" and limit in limits
        return 8.0 * (factor if here else 1.0), 3.0

    return at_loss


def test_curvature_is_compared_by_its_logarithm_at_each_loss():
    found = invented_findings(HESSIAN, "laptop", metrics, facts(sam_is(0.1)))
    assert [v.status for v in found.verdicts] == ["reproduced"] * 3 + ["inconclusive"]
    assert found.verdicts[2].claim == "At a training loss of 0.03, without augmentation: SAM's lambda_max is smaller."
    assert "log10 of lambda_max at a training loss of 0.3, without augmentation: -0.0" in found.verdicts[0].evidence
    assert "Holm's correction for 5 comparisons" in found.verdicts[0].evidence
    (comparison,) = found.verdicts[0].comparisons
    assert comparison.num_pairs == 10
    assert comparison.difference.mean == pytest.approx(-1.0, abs=0.01)
    at_loss, where, end = found.tables
    assert [(row[0], row[1]) for row in at_loss.rows] == [("none", f"{x:g}") for x in LIMITS]
    assert at_loss.rows[0][2].measured.mean == pytest.approx(8.0, rel=0.01)
    assert at_loss.rows[0][3].measured.mean == pytest.approx(0.8, rel=0.01)
    assert where.rows[1][4].measured.mean == pytest.approx(0.09)  # the loss there, of SGD
    assert end.rows[0][2].claimed == "approximately 24"
    assert end.rows[2][3].claimed == "up to 2.6"
    assert [row[1] for row in end.rows].count("rho") == 1


@pytest.mark.parametrize(
    ("factor", "limits", "reproduced", "others"),
    [
        (0.1, (0.1,), [1], "inconclusive"),
        (0.1, (0.3, 0.03), [0, 2], "inconclusive"),
        (10.0, LIMITS, [], "not reproduced"),
    ],
)
def test_each_loss_is_judged_by_itself(factor, limits, reproduced, others):
    found = invented_findings(HESSIAN, "laptop", metrics, facts(sam_is(factor, limits)))
    statuses = [v.status for v in found.verdicts[:END]]
    assert statuses == ["reproduced" if i in reproduced else others for i in range(END)]


@pytest.mark.parametrize("method", ["SGD", "SAM"])
def test_where_one_run_never_reaches_a_loss_nothing_is_tested_there_and_the_others_are(method):
    def never(job, limit):
        return method_of(job) == method and job.seed == 2 and limit == 0.03

    found = invented_findings(HESSIAN, "laptop", metrics, facts(sam_is(0.1), never=never))
    assert [v.status for v in found.verdicts[:END]] == ["reproduced"] * 2 + ["not tested at this scale"]
    lost = found.verdicts[2]
    assert f"the loss of 1 of 10 runs of {method} never falls below 0.03" in lost.evidence
    assert not lost.comparisons
    row = found.tables[0].rows[2]
    shown = dict(zip(("SGD", "SAM"), row[2:4], strict=True))
    assert {m: len(cell.values) for m, cell in shown.items()} == {"SGD": 10, "SAM": 10} | {method: 9}
    assert row[4] == ""
    assert found.num_missing == 0


def test_a_missing_run_is_not_one_that_never_reaches_a_loss():
    some = only(lambda job: job.seed != 4, metrics)
    found = invented_findings(HESSIAN, "laptop", some, facts(sam_is(0.1), never=lambda job, limit: job.seed == 2))
    assert {v.status for v in found.verdicts} == {"not tested"}
    assert "8 of 10 pairs are available" in found.verdicts[0].evidence
    assert found.num_missing == 2
    assert not cells(found, Comparison)


@pytest.mark.parametrize(
    ("sgd", "sam", "held"),
    [
        ((24.0, 11.4), (1.0, 2.6), "reproduced"),
        ((1.0, 2.6), (24.0, 11.4), "not reproduced"),
        ((24.0, 2.6), (1.0, 11.4), "not reproduced"),  # one of the two the other way round
        ((24.0, 3.0), (1.0, 3.0), "inconclusive"),  # one of the two
    ],
)
def test_the_end_of_training_is_judged_by_the_largest_eigenvalue_and_its_ratio_to_the_fifth(sgd, sam, held):
    def at_end(job):
        return sam if method_of(job) == "SAM" else sgd

    found = invented_findings(HESSIAN, "laptop", metrics, facts(sam_is(1.0), at_end))
    assert found.verdicts[END].status == held
    assert "lambda_max at the end, without augmentation" in found.verdicts[END].evidence
    largest = next(row for row in found.tables[2].rows if row[1] == "largest lambda_max/lambda_5")
    assert largest[2].measured.mean == pytest.approx(max(sgd[1], 3.0), rel=0.01)
    over, ratios, density, *_ = found.figures
    assert list(over.series[0].x) == list(ratios.series[0].x) == list(LIMITS)
    assert over.series[0].y[0] == pytest.approx(8.0, rel=0.01)
    assert len(found.figures) == 3
    for series in density.series:
        assert np.trapezoid(series.y, series.x) == pytest.approx(1.0, abs=0.05)


def test_the_gate_at_the_end_is_the_training_error_of_sgd():
    def unfit(job):
        return metrics(job) | {"train_error": 0.03 * (method_of(job) == "SGD")}

    found = invented_findings(HESSIAN, "laptop", unfit, facts(sam_is(0.1)))
    assert found.verdicts[END].status == "not tested at this scale"
    assert "SGD ends with a training error of 3.0 %, above 2 %" in found.verdicts[END].evidence
    assert [v.status for v in found.verdicts[:END]] == ["reproduced"] * 3  # whoever reaches a loss is at that loss


def test_eigenvalues_that_did_not_converge_are_counted():
    def found(job, measurement):
        values = facts(sam_is(0.1))(job, measurement)
        if isinstance(measurement, SpectrumAtLoss) and job.seed == 1:
            values["at_loss"]["0.1"]["converged"] = False
        return values

    notes = invented_findings(HESSIAN, "laptop", metrics, found).notes
    assert "In 2 of 80 spectra the largest eigenvalues had not converged." in notes  # three losses and the end


def test_the_plan_says_what_is_run_compared_and_measured():
    plan = plan_of(HESSIAN, "laptop")
    assert len(plan["comparisons"]) == 5
    assert plan["comparisons"][0] == "log10 of lambda_max at a training loss of 0.3, without augmentation: SAM vs. SGD"
    assert set(plan["groups"]) == {"none, SGD", "none, SAM"}
    for name, group in plan["groups"].items():
        assert group["seeds"] == list(range(10))
        assert group["spec"]["keep_every"] == 1
        assert group["spec"]["model"] == {"name": "wrn-10-2", "norm": "none"}
        assert group["spec"]["optim"].get("rho") == ("auto" if "SAM" in name else None)
        assert AT_LOSS["laptop"].name in group["measurements"]
    assert AT_LOSS["laptop"].num_examples is None  # all training images
