"""Tables and the bound on invented runs: what is trained, compared, and said of it."""

import math
import random

import numpy as np
import pytest

from flatmin.lab.foret2021.claims.tables import NOISE_PERCENT
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.studies.conditions import SEEDS
from flatmin.lab.studies.findings import Comparison
from invented_runs import cells, invented_findings, invented_runs, only, wobble


def best_alpha_8(job):
    return {"valid_error": 0.1 + abs(job.experiment.data.mixup - 8) / 100, "test_error": 0.2}


def test_bootstrapped_methods_have_the_settings_of_those_they_follow_and_mixup_may_train_longer():
    """At the paper's scale: its rho for each noise level, 32 examples on each accelerator, 200 epochs."""
    found = {percent: {} for percent in NOISE_PERCENT}
    for record in invented_runs(ITEMS["label-noise"], "paper", best_alpha_8).values():
        if record.seed in SEEDS:
            method, data, optim = record.experiment.name.split("/")[-1], record.experiment.data, record.experiment.optim
            settings = (record.experiment.epochs, data.mixup, optim.rho, optim.m, data.bootstrap)
            found[round(100 * data.label_noise)][method] = settings
    for percent, rho in ((20, 0.1), (40, 0.1), (60, 0.1), (80, 0.05)):
        assert found[percent] == {
            "SGD": (200, 0.0, 0.0, 32, False),
            "SGD, twice the epochs": (400, 0.0, 0.0, 32, False),
            "Mixup": (200, 8.0, 0.0, 32, False),
            "Mixup, twice the epochs": (400, 8.0, 0.0, 32, False),
            "Bootstrap + Mixup": (200, 8.0, 0.0, 32, True),
            "SAM": (200, 0.0, rho, 32, False),
            "Bootstrap + SAM": (200, 0.0, rho, 32, True),
        }


def lower_in_turn(job):
    """SGD gains from more epochs, Mixup loses by them."""
    data, longer = job.experiment.data, job.experiment.epochs > 200
    error = (0.3 + 0.1 * longer if data.mixup else 0.5 - 0.1 * longer) - job.experiment.optim.rho - 0.1 * data.bootstrap
    return {"valid_error": error, "test_error": error + 0.001 * job.seed, "train_error": 0.5}


def test_sam_is_compared_with_the_better_of_both_lengths_of_sgd_and_of_mixup_and_bootstrap_with_itself_alone():
    found = invented_findings(ITEMS["label-noise"], "paper", lower_in_turn)
    names = {}
    for row in (row for table in found.tables for row in table.rows if isinstance(row[-1], Comparison)):
        names.setdefault(row[0], []).append(row[-1].name)
    expected = ["SAM - SGD, twice the epochs", "SAM - Mixup", "Bootstrap + SAM - SAM"]
    assert names == {f"{percent} %": expected for percent in NOISE_PERCENT}
    assert "accuracy" in found.tables[0].title
    sgd = next(row for row in found.tables[0].rows if row[0] == "SGD")
    assert [cell.measured.mean for cell in sgd[1:]] == pytest.approx([100 - 50.2] * 4)
    assert sgd[1].claimed == "84.8"


def best_rho_is(best, train_error=0.0):
    """By the validation error one rho is best, and none the worst; by the test error it is the other way round."""

    def metrics(job):
        rho = job.experiment.optim.rho
        error = 0.1 + abs(rho - best) + 0.5 * (rho == 0) + random.Random(job.name).gauss(0, 1e-3)
        return {"valid_error": error, "test_error": 1 - error, "train_error": train_error * (rho == 0)}

    return metrics


def test_table_8_has_validation_errors_of_three_bootstrapped_models_in_each_cell():
    found = invented_findings(ITEMS["noise-and-rho"], "paper", best_rho_is(0.2))
    (table,) = found.tables
    rhos = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    records = invented_runs(ITEMS["noise-and-rho"], "paper", best_rho_is(0.2)).values()
    assert {(r.experiment.optim.rho, r.experiment.data.label_noise) for r in records} == {
        (rho, percent / 100) for rho in rhos for percent in NOISE_PERCENT
    }
    specs = [(r.experiment.data, r.experiment.optim, r.seed) for r in records]
    assert {(d.validation, d.bootstrap, o.m) for d, o, _ in specs} == {(0.1, True, 32)}
    assert {seed for _, _, seed in specs} == {0, 1, 2}
    for rho, row in zip(rhos[1:], table.rows[1:], strict=True):
        assert [cell.measured.mean for cell in row[1:]] == pytest.approx([10 + 100 * abs(rho - 0.2)] * 4, abs=0.2)
        assert {len(cell.values) for cell in row[1:]} == {3}
    assert table.rows[0][1].claimed == "15.0"
    assert found.num_missing == 0


@pytest.mark.parametrize(
    ("best", "beats_the_others", "rival"),
    [(0.1, ["reproduced"] * 2 + ["not reproduced"], "0.05"), (0.2, ["not reproduced"] * 3, "0.2")],
)
def test_the_papers_rho_is_compared_with_no_sam_and_with_the_best_other_rho(best, beats_the_others, rival):
    """The paper's is 0.05 at 80 % noise."""
    found = invented_findings(ITEMS["noise-and-rho"], "laptop", best_rho_is(best))
    by_claim = {v.claim: v for v in found.verdicts}
    assert len(by_claim) == 6
    assert [v.status for c, v in by_claim.items() if c.endswith("than training without SAM.")] == ["reproduced"] * 3
    others = {c: v for c, v in by_claim.items() if "the best other rho" in c}
    assert [v.status for v in others.values()] == beats_the_others
    claim, verdict = next(iter(others.items()))
    assert claim == "20 % noise: rho = 0.1 has a lower validation error than the best other rho (0.05, 0.2, 0.5)."
    assert f"(rho = {rival}); difference {'-5' if best == 0.1 else '10'}" in verdict.evidence
    assert "n = 3" in verdict.evidence
    assert "Holm's correction for 6 comparisons" in verdict.evidence


def test_table_8_is_no_test_where_training_without_sam_does_not_fit_its_labels():
    found = invented_findings(ITEMS["noise-and-rho"], "laptop", best_rho_is(0.1, train_error=0.06))
    assert {v.status for v in found.verdicts} == {"not tested at this scale"}
    assert "without SAM the training error ends at 6.0 %, above 5 %" in found.verdicts[0].evidence


@pytest.mark.parametrize(("epochs", "rises"), [(20, "not reproduced"), (80, "not tested at this scale")])
def test_table_2_says_nothing_of_more_epochs_where_sgd_does_not_fit(epochs, rises):
    """SGD's training error is 10 % for so many epochs: that closes the gate of all claims on these epochs."""

    def of_job(job):
        is_unfit = job.experiment.epochs == epochs and not job.experiment.optim.uses_sam
        errors = {"test_error": 0.6 - 0.001 * job.experiment.epochs + 0.001 * job.seed**2 / job.experiment.epochs}
        return errors | {"train_error": 0.1 if is_unfit else 0.0}

    found = invented_findings(ITEMS["imagenet"], "laptop", of_job)
    assert [v.status for v in found.verdicts[-2:]] == ["not tested at this scale", rises]
    why = f"at this scale: {epochs} epochs: SGD ends with a training error of 10.0 %, above 2 %."
    assert [why in v.evidence for v in found.verdicts[-2:]] == [True, rises == "not tested at this scale"]


def test_table_8_has_the_papers_numbers_on_a_laptop_too_and_judges_nothing_while_runs_are_missing():
    with_sam = only(lambda job: job.experiment.optim.rho, best_rho_is(0.2))
    found = invented_findings(ITEMS["noise-and-rho"], "laptop", with_sam)
    assert len(cells(found)) == 15
    assert [cell.claimed for cell in cells(found)[:3]] == ["15.0", "31.2", "73.5"]
    assert sum(cell.measured is None for cell in cells(found)) == 3
    assert found.num_missing == 9
    assert {v.status for v in found.verdicts} == {"not tested"}


def test_which_other_rho_is_best_is_not_known_before_all_have_run():
    some = only(lambda job: (job.experiment.optim.rho, job.seed) != (0.5, 2), best_rho_is(0.2))
    verdicts = invented_findings(ITEMS["noise-and-rho"], "laptop", some).verdicts
    assert "no pair of runs of rho = 0.1 and the best other rho is available" in verdicts[1].evidence
    assert verdicts[1].status == "not tested"


@pytest.mark.parametrize(
    ("sgd", "sam", "held"),
    [
        ((0.30, 0.25, 0.28), (0.28, 0.24, 0.20), ["reproduced", "reproduced"]),
        ((0.30, 0.25, 0.20), (0.28, 0.20, 0.24), ["not reproduced", "not reproduced"]),
        ((0.20, 0.25, 0.25), (0.28, 0.24, 0.24), ["inconclusive", "inconclusive"]),
    ],
)
def test_more_epochs_are_judged_with_sam_from_each_to_the_next_and_without_it_at_the_end(sgd, sam, held):
    def metrics(job):
        which, rho = (20, 40, 80).index(job.experiment.epochs), job.experiment.optim.rho
        noise = np.random.default_rng((job.seed, which, rho > 0)).standard_normal()
        return {"test_error": (sam if rho else sgd)[which] + 1e-3 * noise, "train_error": 0.0}

    found = invented_findings(ITEMS["imagenet"], "laptop", metrics)
    falls, rises = found.verdicts[-2:]
    assert [falls.status, rises.status] == held
    assert falls.claim == "With SAM the error keeps falling from 100 to 200 to 400 epochs."
    assert [c.name for c in falls.comparisons] == ["40 epochs - 20 epochs", "80 epochs - 40 epochs"]
    assert [c.name for c in rises.comparisons] == ["40 epochs - 80 epochs"]
    assert [cell.claimed for cell in found.tables[0].rows[0][1:]] == [
        *("22.9 ± 0.1", "22.5 ± 0.1", "22.3 ± 0.1", "21.4 ± 0.1", "22.3 ± 0.1", "20.9 ± 0.1")
    ]


def error_reduction(reduction, keep=lambda job: True, train_error=lambda e: 0.0):
    """The item on a laptop, where SAM lowers a baseline's error of 0.2 by a share of it, by its experiment."""

    def metrics(job):
        optim = job.experiment.optim
        error = 0.2 * (1 - (reduction(job.experiment) if optim.uses_sam else 0.0)) + wobble(job.seed + optim.uses_sam)
        # Best: the suggested radius, or one inside of the grid.
        valid = 0.2 + (abs(optim.rho_number - 0.02) if optim.rho_factor is None else abs(math.log2(optim.rho_factor)))
        return {"test_error": error, "valid_error": valid, "train_error": train_error(job.experiment)}

    return invented_findings(ITEMS["error-reduction"], "laptop", only(keep, metrics))


@pytest.mark.parametrize(
    ("reduction", "held"),
    [
        (lambda e: 0.1, "reproduced"),
        (lambda e: 0.0, "inconclusive"),
        (lambda e: -0.1, "not reproduced"),
        (lambda e: 0.1 if e.optim.m == 16 else -0.1, "not reproduced"),  # one of two methods
        (lambda e: 0.1 if e.optim.m == 16 else 0.0, "inconclusive"),
        # Far lower in one condition of four with m = 16, a little higher in the others: no majority.
        (lambda e: 0.5 if e.data.augment == "none" or not e.optim.m else -0.02, "inconclusive"),
    ],
)
def test_error_reduction_is_judged_by_its_mean_over_conditions_with_replicas_as_the_unit(reduction, held):
    found = error_reduction(reduction)
    (verdict,) = found.verdicts
    assert verdict.status == held
    assert verdict.claim == "Switching to SAM reduces the error in the vast majority of conditions."
    assert "n = 5" in verdict.evidence
    assert any("replicas as independent, not the conditions" in note for note in found.notes)


def test_error_reduction_counts_conditions_and_waits_for_all_of_them():
    found = error_reduction(lambda e: 0.1)
    evidence = found.verdicts[0].evidence
    assert "SAM: lower in 5 of 5 conditions (sign test, p = 0.062)" in evidence
    assert "SAM, m = 16: lower in 4 of 4 conditions (sign test, p = 0.125)" in evidence
    assert [len(series.x) for series in found.figures[0].series[1:]] == [5, 4]
    # A condition whose baseline does not fit its training set is not counted.
    unfit = error_reduction(lambda e: 0.1, train_error=lambda e: 0.1 if e.data.augment == "cutout" else 0.0)
    assert "SAM, m = 16: lower in 3 of 3 conditions" in unfit.verdicts[0].evidence
    half = error_reduction(lambda e: 0.1, keep=lambda job: job.experiment.data.name != "flowers102")
    assert half.verdicts[0].status == "not tested"
    assert "lower in 4 of 4 conditions" in half.verdicts[0].evidence
