"""Tables 3 and 10 on a laptop: arms, grids, the gate, and what is ours."""

import pytest

from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.cost import cost
from flatmin.lab.studies.registered_plan import plan_of
from flatmin.lab.studies.study import describe, planned_jobs
from flatmin.lab.training.schedule import learning_rate
from invented_runs import invented_findings, invented_runs, wobble

TABLE3, TABLE10 = ITEMS["fine-tuning"], ITEMS["fine-tuning-rho-0.05"]
WHERE = "flowers102, timm/tf_efficientnet_lite0"
ON_NORM = "SAM on norm layers"


def method_of(job):
    return job.experiment.name.removesuffix(" (choosing)").split("lite0/")[-1]


def metrics(job, best_lr=0.002, best=0.125, unfit=False):
    """SAM's error is below SGD's, and norm layers' in between; one learning rate and one factor are best."""
    e, method = job.experiment, method_of(job)
    error = {"SGD": 0.45, "SGD, twice the epochs": 0.44, "SAM": 0.40, ON_NORM: 0.42}[method]
    error += wobble(job.seed + len(method))
    off = abs(e.optim.lr - best_lr) if not e.optim.uses_sam else abs(e.optim.rho_number - best)
    values = {"test_error": error, "test_loss": 2 + error, "test_ece": error / 3, "train_error": 0.1 if unfit else 0.0}
    return values | ({"valid_error": 0.3 + 0.1 * off} if e.data.validation else {})


@pytest.fixture(scope="module")
def known():
    return invented_runs(TABLE3, "laptop", metrics)


def test_five_replicas_of_four_arms_for_20_epochs_and_two_core_hours():
    jobs = planned_jobs(TABLE3, "laptop").values()
    replicas = [job for job in jobs if job.seed != TUNING_SEED]
    epochs = {(method_of(job), job.experiment.epochs) for job in replicas}
    assert epochs == {("SGD", 20), ("SGD, twice the epochs", 40), ("SAM", 20), (ON_NORM, 20)}
    assert len(replicas) == 20
    both = {**planned_jobs(TABLE3, "laptop"), **planned_jobs(TABLE10, "laptop")}
    assert cost(both.values()) == 600 * 20 * (3 + 5 + 2 * 5 + 2 * (2 * (5 + 5) + 5))  # times 9 ms
    assert len(both) == 3 + 5 + 5 + 2 * 10 + 5


def test_the_first_epoch_is_warm_up():
    optim = planned_jobs(TABLE3, "laptop").popitem()[1].experiment.optim
    rates = [learning_rate(optim, step, 20 * 38, 38) / optim.lr for step in range(20 * 38)]
    assert rates[:38] == pytest.approx([(step + 1) / 39 for step in range(38)])
    assert max(rates) == rates[38] == 1.0


def test_the_learning_rate_is_chosen_without_sam_and_shared(known):
    tried = {e.optim.lr for e in (r.experiment for r in known.values()) if e.data.validation and not e.optim.uses_sam}
    assert tried == {0.001, 0.002, 0.005}
    replicas = [r.experiment for r in known.values() if not r.experiment.data.validation]
    assert {e.optim.lr for e in replicas} == {0.002}
    assert {(e.optim.rho, e.optim.perturb) for e in replicas} == {(0.0, "all"), ("0.125x", "all"), ("0.125x", "norm")}


def test_grids_are_in_units_of_the_suggestion_and_grow_downward_for_all_weights():
    plan = plan_of(TABLE3, "laptop")["groups"]
    whole = [v["optim.rho"] for v in plan[f"{WHERE}, SAM, choosing"]["varies"]]
    assert whole == ["0.03125x", "0.0625x", "0.125x", "0.25x", "0.5x"]  # 0.031 times that: 0.001 to 0.015
    norm = [v["optim.rho"] for v in plan[f"{WHERE}, {ON_NORM}, choosing"]["varies"]]
    assert norm == ["0.125x", "0.25x", "0.5x", "auto", "2x"]
    spec = plan[f"{WHERE}, {ON_NORM}"]["spec"]
    assert (spec["optim"]["perturb"], spec["precision"]) == ("norm", "float32")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({}, None),
        ({"unfit": True}, "SGD, twice the epochs ends with a training error of 10.0 %, above 2 %"),
        ({"best_lr": 0.0}, "SGD's learning rate is at the edge"),
        ({"best": 0.0}, "SAM's rho is at the edge of its grid"),
    ],
)
def test_the_gate_needs_a_fit_and_choices_inside_their_grids(how, reason):
    """The baseline that counts is SGD with twice the epochs, whose learning rate SGD chose."""
    found = invented_findings(TABLE3, "laptop", lambda job: metrics(job, **how))
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{WHERE}: SAM has a lower test error"))
    assert verdict.status == ("reproduced" if reason is None else "not tested at this scale")
    assert (reason or "points over 5 pairs") in verdict.evidence


def test_a_learning_rate_at_the_edge_is_tried_beyond_it():
    known = invented_runs(TABLE3, "laptop", lambda job: metrics(job, best_lr=0.01))
    tried = {r.experiment.optim.lr for r in known.values() if method_of(r) == "SGD" and r.experiment.data.validation}
    assert tried == {0.001, 0.002, 0.005, 0.01, 0.02}
    replicas = {r.experiment.optim.lr for r in known.values() if not r.experiment.data.validation}
    assert replicas == {0.01}


def test_norm_layers_loss_and_calibration_are_ours_and_corrected_apart(known):
    found = describe(TABLE3, "laptop", known)
    papers = [v for v in found.verdicts if not v.claim.endswith("(ours)")]
    assert [v.claim for v in papers] == [f"{WHERE}: SAM has a lower test error than SGD, twice the epochs."]
    assert "Holm" not in papers[0].evidence
    ours = [v for v in found.verdicts if v.claim.endswith("(ours)")]
    assert len(ours) == 5
    assert all("Holm's correction for 5 comparisons" in v.evidence for v in ours)


def test_table_10_shares_sgds_runs_and_has_rho_0_05():
    shared = planned_jobs(TABLE3, "laptop")
    own = [job for name, job in planned_jobs(TABLE10, "laptop").items() if name not in shared]
    assert {(job.experiment.optim.rho, job.experiment.optim.perturb) for job in own} == {(0.05, "all")}
    assert sorted(job.seed for job in own) == [0, 1, 2, 3, 4]


def test_nothing_is_judged_before_the_runs():
    for item in (TABLE3, TABLE10):
        assert {v.status for v in describe(item, "laptop", Records()).verdicts} == {"not tested"}
