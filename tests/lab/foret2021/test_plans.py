"""What every item trains, at each scale; and `flatmin reproduce all --scale smoke`, from the command to the page."""

import dataclasses
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F

from flatmin.cli import main
from flatmin.lab.cheap_sam.study import CHEAP_SAM
from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.figures import hessian, prediction, zoo
from flatmin.lab.foret2021.item_findings import SPREADS
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.foret2021.scales import CUTS
from flatmin.lab.rho_rule import RHO_RULE
from flatmin.lab.runs.record import Records, RunRecord
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.cost import cost, model_flops, num_models, training_flops
from flatmin.lab.studies.findings import Comparison, LineFigure
from flatmin.lab.studies.study import SCALES, describe, planned_jobs, run_study
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.progress import passes
from flatmin.lab.training.trained_model import load_trained
from flatmin.measures import sam_update_cosine
from invented_runs import cells, in_process


@cache
def plan(name, scale):
    return list(planned_jobs(ITEMS[name], scale).values())


def specs(scale, name):
    return [job.experiment for job in plan(name, scale)]


def test_every_item_of_the_paper_is_there():
    assert set(ITEMS) == {
        *("error-reduction", "table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion", "noise-and-rho"),
        *("rho-0.05", "fine-tuning-rho-0.05", "landscape", "hessian", "m-and-rho", "predictive", "second-order"),
        *("p-norm", "inner-steps", "bound"),
    }


def test_every_job_of_every_scale_can_be_run_and_measured():
    for scale in SCALES:
        for name in ITEMS:
            assert plan(name, scale) or (name, scale) == ("predictive", "paper")  # needs the models of the competition
            for job in plan(name, scale):
                assert Experiment.from_json(job.experiment.to_json()) == job.experiment
                assert job.experiment.name.startswith(f"{name}/") or job.experiment.name == "fine-tuning/pretraining"
                for epoch in {m.epoch for m in job.measurements} - {None}:
                    assert epoch % job.experiment.keep_every == 0
                    assert epoch <= job.experiment.epochs


def test_where_nothing_was_run_everything_is_missing_nothing_is_judged_and_settings_power_and_cuts_are_said():
    for name, item in ITEMS.items():
        for scale in SCALES:
            found = describe(item, scale, Records())
            assert (found.num_missing, list(found.runs)) == (len(plan(name, scale)), [])
            assert {v.status for v in found.verdicts} == {"not tested"}
            assert not cells(found, Comparison)
            assert tuple(found.cut) == (CUTS.get(name, ()) if scale == "laptop" else ())
            told = [h.name for h in found.hyperparameters]
            assert len(told) == len(set(told)) or scale == "paper"
            assert any("Power, computed" in note for note in found.notes) == (scale == "laptop" and name in SPREADS)
            if scale == "laptop" and name != "error-reduction":  # its settings are in the tables that it is drawn from
                assert set(told) >= {"model", "training images", "batch size", "learning rate", "momentum", "epochs"}
    assert CUTS.keys() <= ITEMS.keys()


def test_power_is_computed_for_as_many_pairs_as_there_are_replicas():
    notes = describe(ITEMS["landscape"], "laptop", Records()).notes
    assert any("10 pairs show a difference of 1.2 in the mean rise of the loss" in note for note in notes)
    for name, (_, _, num_pairs, _) in SPREADS.items():
        assert num_pairs == len({job.seed for job in plan(name, "laptop")} - {TUNING_SEED}), name


def test_weights_of_spectra_are_kept_rarely_at_the_papers_scale():
    """They are 220 MB each: 7 GB of a run."""
    assert {e.keep_every for e in specs("paper", "hessian")} == {10}


def test_landscapes_have_a_rho_that_is_tuned_on_validation():
    tuning = [job.experiment for job in plan("landscape", "laptop") if job.seed == TUNING_SEED]
    assert {e.optim.rho for e in tuning} == {0.05, 0.1, 0.2}
    assert {(e.data.validation, e.keep_every) for e in tuning} == {(0.1, None)}


@pytest.mark.parametrize("name", ["landscape", "hessian"])
def test_curvature_has_ten_replicas_on_a_laptop(name):
    replicas = [(job.experiment.optim.uses_sam, job.seed) for job in plan(name, "laptop") if job.seed != TUNING_SEED]
    assert sorted(replicas) == [(sam, seed) for sam in (False, True) for seed in range(10)]


def test_perturbations_of_the_sup_norm_are_as_long_as_those_of_the_2_norm():
    num_weights = 36_479_194 - 258_560  # of WRN-28-10 without weights in its shortcuts
    found = {(e.optim.p, e.optim.direction, e.optim.rho) for e in specs("paper", "p-norm") if e.optim.rho}
    assert {rho for p, direction, rho in found if (p, direction) == (2.0, "gradient")} == set(settings.RHO_GRID)
    sup = sorted(rho * math.sqrt(num_weights) for p, _, rho in found if p == math.inf)
    np.testing.assert_allclose(sup, settings.RHO_GRID, rtol=1e-6)
    assert {rho for _, direction, rho in found if direction == "random"} > set(settings.RHO_GRID)
    assert {e.data.validation for e in specs("paper", "p-norm")} == {0.1}


@pytest.mark.parametrize(("scale", "decay"), [("paper", 5e-4), ("laptop", 0.0)])
def test_the_cosine_has_the_l2_term_where_the_loss_of_training_has_it(scale, decay):
    for job in plan("second-order", scale):
        assert {m.weight_decay for m in job.measurements} == {decay}


LAPTOP_COST = {  # runs, passes over images
    "landscape": (23, 1_440_000),
    "hessian": (20, 1_200_000),
    "m-and-rho": (60, 5_000_000),
    "predictive": (192, 6_720_000),
    "second-order": (10, 1_200_000),
    "p-norm": (70, 5_400_000),
    "inner-steps": (25, 3_200_000),
    "bound": (10, 600_000),
}


def test_what_items_cost_is_known_and_a_laptop_can_pay_for_all_of_them():
    """A pass of WRN-10-2 over 16 x 16 pixels in three colors is the unit: a core does 1,900 of them in a second."""
    for name, expected in LAPTOP_COST.items():
        jobs = plan(name, "laptop")
        assert (len(jobs), cost(jobs)) == expected, name
        assert {e.data.name for e in specs("laptop", name)} == {"fashion-mnist"}
    data = Data(name="cifar10", train_size=1, image_size=16)
    unit = Experiment(data=data, model=Model(name="wrn-10-2"), epochs=1)
    later = ("40 %/SGD, m = 16, twice the epochs", "p = inf, rho=1")  # which an audit of the results added
    everything = [j for name in ITEMS for j in plan(name, "laptop") if not j.experiment.name.endswith(later)]
    # 20 core hours. In pilots the models of predictive power stopped after about half of their epochs.
    most = 20 * 3600 * 1900 * training_flops([Job(experiment=unit)]) + training_flops(plan("predictive", "laptop")) / 2
    assert training_flops(everything) < most
    for name in ITEMS.keys() - {"predictive"}:  # whose models are others'
        jobs = plan(name, "paper")
        assert cost(jobs) > 0
        assert num_models(jobs) == len(jobs) or name in ("label-noise", "noise-and-rho")


def test_the_model_whose_predictions_are_labels_counts_too():
    once = Experiment(data=Data(train_size=10))
    twice = dataclasses.replace(once, data=dataclasses.replace(once.data, bootstrap=True))
    assert num_models([Job(experiment=twice)]) == num_models([Job(experiment=twice), Job(experiment=once)]) == 2


def test_a_pass_costs_what_the_arithmetic_of_its_model_does():
    """A convolution of c channels takes a multiple of c^2 operations for each pixel: twice the width, four times it."""
    small, wide = (Experiment(data=Data(name="fashion-mnist"), model=Model(name=f"wrn-10-{n}")) for n in (2, 4))
    assert 3.5 < model_flops(wide) / model_flops(small) < 4
    large = dataclasses.replace(small, data=Data(name="cifar10"))
    assert model_flops(large) / model_flops(small) == pytest.approx((32 / 28) ** 2, rel=0.03)
    flowers = Experiment(data=Data(name="flowers102", image_size=128), model=Model(name="timm/tf_efficientnet_lite0"))
    assert 2 * 0.12e9 < model_flops(flowers) < 2 * 0.15e9  # published: 0.4 billion multiply-adds at 224 pixels


@pytest.mark.parametrize(
    ("optim", "num_passes"),
    [
        (Optim(), 1),
        (Optim(rho=0.1), 2),
        (Optim(rho=0.1, ascent_steps=3), 4),
        (Optim(rho=0.1, second_order=True), 4),
        (Optim(rho=0.1, direction="random"), 2),
    ],
)
def test_a_sweep_and_a_plan_count_the_same_passes(optim, num_passes):
    job = Job(experiment=Experiment(data=Data(train_size=10), optim=optim, epochs=3))
    assert (passes(job), cost([job])) == (3 * num_passes, 30 * num_passes)


def test_the_runs_of_the_evidence_are_still_in_the_plan():
    known = Records(Path(__file__).parents[3] / "results" / "foret2021-laptop")
    stored = set(known)
    assert stored
    assert stored <= {name for item in ITEMS.values() for name in planned_jobs(item, "laptop", known)}


TABLES = ("table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion", "noise-and-rho", "rho-0.05")


def test_all_items_run_from_the_command_to_the_page(tmp_path, monkeypatch):
    """One test, because its runs would else be made again for every process of pytest that has a part of it."""
    monkeypatch.setattr(prediction, "NUM_RESAMPLES", 99)
    runs, command = tmp_path / "runs", ["--scale", "smoke", "--runs", str(tmp_path / "runs")]
    trains = [*command, "--processes", "2", "--threads", "1"]
    known, some = Records(runs), ("label-noise/20 %/SGD", "cheap-sam/", "rho-rule/")
    for study in (ITEMS["label-noise"], CHEAP_SAM, RHO_RULE):
        run_study(study, "smoke", known, in_process(runs), some)
    part = describe(ITEMS["label-noise"], "smoke", known)
    measured = {row[0]: row[1].measured is not None for row in part.tables[0].rows}
    assert (measured["SGD"], measured["SAM"], part.num_missing > 0) == (True, False, True)
    for study in (CHEAP_SAM, RHO_RULE):
        _check_findings(describe(study, "smoke", known), study)

    assert main(["reproduce", "all", *trains]) == 0
    known = Records(runs)
    for name, item in ITEMS.items():
        findings = describe(item, "smoke", known)
        _check_findings(findings, item)
        if name in TABLES:
            _check_means(findings, known)
        _check_that_lost_runs_are_tolerated(item, known)
    _check_cosines(runs, known)
    _check_spectra(runs, known)
    _check_zoo(known)
    page = (runs / "report-smoke" / "index.html").read_text()
    for item in ITEMS.values():
        assert item.source.replace("&", "&amp;") in page

    # The page written again from what is there has the same bytes; and nothing that is finished is run again.
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert len(before) >= len(known)
    assert main(["report", "all", *command, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "index.html").read_text() == page
    assert main(["reproduce", "table1", "bound", *command]) == 0
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")} == before


def _check_findings(found, item):
    assert (found.item, found.scale, found.title, found.num_missing) == (item.name, "smoke", item.title, 0)
    assert found.source.partition(";")[0] == item.source.partition(";")[0]
    assert found.tables or found.figures
    # Seconds of training prove nothing.
    assert all(v.status == "not tested" and "smoke test" in v.evidence for v in found.verdicts)
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)
    assert all(cell.measured is not None and math.isfinite(cell.measured.mean) for cell in cells(found))
    named = {run for c in (*cells(found), *cells(found, Comparison), *found.figures) for run in c.runs}
    assert named <= set(found.runs)
    for figure in found.figures:
        assert figure.runs
        if isinstance(figure, LineFigure):
            for series in figure.series:
                for values in (series.y, series.half_width, series.hover):
                    assert values is None or len(values) == len(series.x) > 0
                assert np.isfinite(series.y).all()
                assert not figure.log_y or min(series.y) > 0
        else:
            assert [s.name for s in figure.surfaces] == ["SGD", "SAM"]
            assert all(np.shape(s.height) == (len(s.coordinates),) * 2 for s in figure.surfaces)


def _check_means(findings, known):
    """Each cell is the mean of what its runs say."""
    for table in findings.tables:
        chosen = "chosen" in table.title
        metric = "train_error" if "training" in table.title else "test_error"
        metric = "valid_error" if chosen or findings.item == "noise-and-rho" else metric
        for cell in cells(replace(findings, tables=[table])):
            mean = sum(100 * known[run].metrics[metric] for run in cell.runs) / len(cell.runs)
            accuracy = findings.item == "label-noise" and not chosen
            assert cell.measured.mean == pytest.approx(100 - mean if accuracy else mean)


def _check_that_lost_runs_are_tolerated(item, known):
    """Of every three replicas one is lost and of one the measures are; then one diverged."""
    jobs = [job for job in planned_jobs(item, "smoke", known).values() if job.seed != TUNING_SEED]
    for rest in range(3):
        torn, diverged = Records(), Records()
        for records in (torn, diverged):
            records |= known
        for job in jobs[rest::3]:
            torn[job.name] = RunRecord(name=job.name, state="missing")
            diverged[job.name] = RunRecord(name=job.name, state="failed", reason="The loss is not finite.")
        for job in jobs[(rest + 1) % 3 :: 3]:
            torn[job.name] = replace(known[job.name], measured={})
        unmeasured = sum(bool(job.measurements) for job in jobs[(rest + 1) % 3 :: 3])
        assert describe(item, "smoke", torn).num_missing == len(jobs[rest::3]) + unmeasured
        found = describe(item, "smoke", diverged)
        assert found.num_missing == 0
        assert sum("failed: " in note for note in found.notes) == len(jobs[rest::3])


def _check_cosines(runs, known):
    """The cosine at an epoch is that of its weights."""
    job = next(iter(planned_jobs(ITEMS["second-order"], "smoke", known).values()))
    measured = known[job.name].measured
    for measurement in job.measurements:
        trained = load_trained(runs / job.name, epoch=measurement.epoch)
        batch = trained.batches(trained.dataset.train, job.experiment.data.batch_size)[0]
        expected = sam_update_cosine(trained.network, F.cross_entropy, batch, rho=job.experiment.optim.rho)
        assert measured[measurement.name]["cosine"] == pytest.approx(expected, rel=1e-6)
    assert len({facts["cosine"] for facts in measured.values()}) == len(job.measurements) == 2


def _check_spectra(runs, known):
    """At the first epoch with a loss below a limit, and at the end, of weights that are kept."""
    for name, job in planned_jobs(ITEMS["hessian"], "smoke", known).items():
        measured = known[name].measured
        at_loss = measured[hessian.AT_LOSS["smoke"].name]
        assert [at["epoch"] for at in at_loss["at_loss"].values()] == [1, 1]
        assert len(at_loss["losses"]) == 1
        assert (runs / name / "weights").exists()
        assert math.isfinite(measured[hessian.AT_END["smoke"].name]["lambda_max"])
        assert (known[name].metrics.get("rho") is not None) == job.experiment.optim.uses_sam


def _check_zoo(known):
    """Models count that stop at the loss that they are to stop at, with the learning rate decayed."""
    found = describe(ITEMS["predictive"], "smoke", known)
    assert any("8 settings of 8 count" in note for note in found.notes)
    assert [row[0] for row in found.tables[0].rows] == ["4", "n", "training loss"]
    jobs = planned_jobs(ITEMS["predictive"], "smoke", known)
    assert len(jobs) == 16
    for name in jobs:
        assert zoo.counts(known[name], zoo.ZOOS["smoke"], 1.0)
        assert {"fit_loss", "fit_error"} <= known[name].metrics.keys()
