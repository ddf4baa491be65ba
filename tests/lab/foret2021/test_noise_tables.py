"""The tables on wrong labels, on invented runs: what is trained, what is compared, and what is shown."""

from pathlib import Path

import pytest

from flatmin.lab.foret2021.claims.tables import NOISE_PERCENT
from flatmin.lab.foret2021.tables.label_noise import label_noise, noise_and_rho
from flatmin.lab.runs.directory import Result
from flatmin.lab.studies.conditions import SEEDS, TUNING_SEED
from flatmin.lab.studies.findings import Cell, Comparison
from flatmin.lab.sweeps.jobs import Outcome


class Invented:
    """A laboratory in which a function says how each run ends; None: it is not there."""

    def __init__(self, ending):
        self.ending, self.jobs = ending, []

    def outcomes(self, jobs, what):
        self.jobs += jobs
        return [self._outcome(job) for job in jobs]

    def _outcome(self, job):
        metrics = self.ending(job)
        if metrics is None:
            return Outcome(job=job)
        result = Result(
            experiment=job.experiment, seed=job.seed, directory=Path(job.name), history=[metrics], time_seconds=1.0
        )
        return Outcome(job=job, result=result)


def best_alpha_8(job):
    return {"valid_error": 0.1 + abs(job.experiment.data.mixup - 8) / 100, "test_error": 0.2}


@pytest.mark.parametrize(("percent", "rho"), [(20, 0.1), (40, 0.1), (60, 0.1), (80, 0.05)])
def test_bootstrapped_methods_have_the_settings_of_those_they_follow_and_mixup_may_train_longer(percent, rho):
    """At the paper's scale: its rho for each noise level, 32 examples on each accelerator, 200 epochs."""
    lab = Invented(best_alpha_8)
    label_noise("paper", lab)
    found = {}
    for job in lab.jobs:
        _, column, method = job.experiment.name.split("/")
        if job.seed in SEEDS and column == f"{percent} %":
            data, optim = job.experiment.data, job.experiment.optim
            found[method] = (job.experiment.epochs, data.mixup, optim.rho, optim.m, data.bootstrap)
            assert data.label_noise == pytest.approx(percent / 100)
    assert found == {
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
    found = label_noise("paper", Invented(lower_in_turn))
    names = {}
    for table in found.tables:
        for row in table.rows:
            if isinstance(row[-1], Comparison):
                names.setdefault(row[0], []).append(row[-1].name)
    expected = ["SAM - SGD, twice the epochs", "SAM - Mixup", "Bootstrap + SAM - SAM"]
    assert names == {f"{percent} %": expected for percent in NOISE_PERCENT}


def test_table_4_has_accuracies():
    table = label_noise("paper", Invented(lower_in_turn)).tables[0]
    assert "accuracy" in table.title
    sgd = next(row for row in table.rows if row[0] == "SGD")
    assert [cell.measured.mean for cell in sgd[1:]] == pytest.approx([100 - 50.2] * 4)
    assert sgd[1].claimed == "84.8"


def best_rho_02(job):
    """By the validation error rho = 0.2 is best; by the test error it would be the worst."""
    error = 0.1 + abs(job.experiment.optim.rho - 0.2)
    return {"valid_error": error, "test_error": 1 - error}


def test_table_8_has_validation_errors_of_bootstrapped_networks():
    lab = Invented(best_rho_02)
    found = noise_and_rho("paper", lab)
    (table,) = found.tables
    rhos = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    assert {(job.experiment.optim.rho, job.experiment.data.label_noise) for job in lab.jobs} == {
        (rho, percent / 100) for rho in rhos for percent in NOISE_PERCENT
    }
    for job in lab.jobs:
        data = job.experiment.data
        assert (data.validation, data.bootstrap, job.experiment.optim.m, job.seed) == (0.1, True, 32, TUNING_SEED)
    for rho, row in zip(rhos, table.rows, strict=True):
        assert [cell.measured.mean for cell in row[1:]] == pytest.approx([10 + 100 * abs(rho - 0.2)] * 4)
    assert table.rows[0][1].claimed == "15.0"
    assert "20 %: rho 0.2, 40 %: rho 0.2, 60 %: rho 0.2, 80 %: rho 0.2" in found.verdicts[0].evidence
    assert (found.num_missing, found.verdicts[0].status) == (0, "inconclusive")


def test_table_8_has_the_papers_numbers_on_a_laptop_too_and_counts_what_is_missing():
    found = noise_and_rho("laptop", Invented(lambda job: best_rho_02(job) if job.experiment.optim.rho else None))
    cells = [cell for row in found.tables[0].rows for cell in row if isinstance(cell, Cell)]
    assert len(cells) == 15
    assert [cell.claimed for cell in cells[:3]] == ["15.0", "31.2", "73.5"]
    assert sum(cell.measured is None for cell in cells) == found.num_missing == 3
    assert found.verdicts[0].status == "not tested"
