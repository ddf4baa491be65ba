"""The studies of figures: they run at the smallest scale, have the paper's settings, and judge known numbers right."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from flatmin.lab.studies.item import SCALES
from flatmin.lab.studies.plan import plan, planned_jobs, with_all_missing
from flatmin.lab.sweeps.runners import DryRunner, ReadOnlyRunner
from image_passes import cost, model_flops, num_models, weighted_cost

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.items import FIGURES
from flatmin.lab.foret2021.items import ITEMS as ALL_ITEMS
from flatmin.lab.foret2021.scales import CUTS
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.findings import Cell, Comparison, LineFigure, SurfaceFigure
from flatmin.lab.sweeps.jobs import Job, Outcome, read_outcome
from flatmin.lab.sweeps.measurements import measurement_settings
from flatmin.lab.sweeps.progress import passes
from flatmin.lab.sweeps.run_job import run_job
from flatmin.lab.training.trained_model import load_trained
from flatmin.measures import sam_update_cosine

ITEMS = {name: ALL_ITEMS[name] for name in FIGURES}
every_item = pytest.mark.parametrize("name", ITEMS)


class OneAfterTheOther:
    """A laboratory in this process."""

    def __init__(self, runs):
        self.runs = runs

    def outcomes(self, jobs, what):
        for job in jobs:
            ending = run_job(job, self.runs, None, 60.0)
            assert ending.kind == "done", ending
        return [read_outcome(job, self.runs) for job in jobs]


class Torn:
    """An archive of which some outcomes, or some measures of them, are lost."""

    def __init__(self, runs, lost):
        self.archive, self.lost = ReadOnlyRunner(runs), lost

    def outcomes(self, jobs, what):
        found = self.archive.outcomes(jobs, what)
        if jobs[0].seed == TUNING_SEED:  # without these no other run is asked for
            return found
        return [self.lost(number, outcome) for number, outcome in enumerate(found)]


def cells(findings, kind=Cell):
    return [cell for table in findings.tables for row in table.rows for cell in row if isinstance(cell, kind)]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The findings of an item at the smallest scale, run once, and the folder of its runs."""
    done = {}

    def run(name):
        if name not in done:
            runs = tmp_path_factory.mktemp(name)
            done[name] = ITEMS[name].study("smoke", OneAfterTheOther(runs)), runs
        return done[name]

    return run


@every_item
def test_the_smallest_scale_runs_from_end_to_end(smoke, name):
    found, runs = smoke(name)
    assert found.num_missing == 0
    assert (found.item, found.scale, found.title, found.source.partition(";")[0]) == (
        name,
        "smoke",
        ITEMS[name].title,
        ITEMS[name].source,
    )
    assert sorted(found.runs) == sorted(path.name for path in runs.iterdir())
    assert found.verdicts
    assert all(v.status == "not tested" and "smoke test" in v.evidence for v in found.verdicts)
    assert found.tables
    assert found.figures
    assert found.hyperparameters
    assert all(cell.measured is not None and math.isfinite(cell.measured.mean) for cell in cells(found))
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)
    for figure in found.figures:
        assert set(figure.runs) <= set(found.runs)
        assert figure.runs
        if isinstance(figure, LineFigure):
            assert figure.series
            for series in figure.series:
                assert len(series.x) == len(series.y) > 0
                assert np.isfinite(series.y).all()
                assert series.name
                assert series.half_width is None or len(series.half_width) == len(series.y)
                assert series.hover is None or len(series.hover) == len(series.y)
                assert not figure.log_y or min(series.y) > 0
        else:
            assert isinstance(figure, SurfaceFigure)
            assert [s.name for s in figure.surfaces] == ["SGD", "SAM"]
            assert all(np.shape(s.height) == (len(s.coordinates),) * 2 for s in figure.surfaces)


@every_item
def test_an_archive_of_the_runs_gives_the_same_findings(smoke, name):
    found, runs = smoke(name)
    assert ITEMS[name].study("smoke", ReadOnlyRunner(runs)) == found


@every_item
@pytest.mark.parametrize("scale", SCALES)
def test_where_nothing_was_run_everything_is_missing_and_nothing_is_judged(tmp_path, name, scale):
    nothing, study = ReadOnlyRunner(tmp_path), ITEMS[name].study
    found = with_all_missing(study(scale, nothing), study, nothing)
    assert found.num_missing == len(planned_jobs(study, scale))
    assert len(set(found.runs)) == found.num_missing or name in ("landscape", "hessian")  # whose rho is open
    assert {v.status for v in found.verdicts} == {"not tested"}
    assert not cells(found, Comparison)


@every_item
@pytest.mark.parametrize("rest", [0, 1, 2])
def test_lost_runs_and_measures_are_counted_and_tolerated(smoke, name, rest):
    _, runs = smoke(name)

    def lost(number, outcome):
        if number % 3 == rest:
            return Outcome(job=outcome.job)
        if number % 3 == (rest + 1) % 3:
            return Outcome(job=outcome.job, result=outcome.result)
        return outcome

    def diverged(number, outcome):
        return Outcome(job=outcome.job, failure="The loss is no number.") if number % 3 == rest else outcome

    jobs = [job for job in planned_jobs(ITEMS[name].study, "smoke") if job.seed != TUNING_SEED]
    expected = sum(n % 3 == rest or (n % 3 == (rest + 1) % 3 and bool(job.measurements)) for n, job in enumerate(jobs))
    found = ITEMS[name].study("smoke", Torn(runs, lost))
    assert found.num_missing == expected > 0
    found = ITEMS[name].study("smoke", Torn(runs, diverged))
    assert found.num_missing == 0
    assert sum("failed: " in note for note in found.notes) == sum(n % 3 == rest for n in range(len(jobs)))


@every_item
@pytest.mark.parametrize("scale", SCALES)
def test_every_job_can_be_run_and_measured(name, scale):
    for job in planned_jobs(ITEMS[name].study, scale):
        assert Experiment.from_json(job.experiment.to_json()) == job.experiment
        assert job.experiment.name.startswith(f"{name}/")
        for measurement in job.measurements:
            measurement_settings(measurement)
            if measurement.epoch is not None:
                assert measurement.epoch % job.experiment.keep_every == 0
                assert measurement.epoch <= job.experiment.epochs


def test_laptop_networks_are_trained_on_real_data_and_share_the_tables_runs():
    for name, item in ITEMS.items():
        assert {job.experiment.data.name for job in planned_jobs(item.study, "laptop")} == {"fashion-mnist"}, name


def test_the_cosine_at_an_epoch_is_that_of_its_weights(smoke):
    _, runs = smoke("second-order")
    job = planned_jobs(ITEMS["second-order"].study, "smoke")[0]
    outcome = read_outcome(job, runs)
    for measurement in job.measurements:
        trained = load_trained(runs / job.name, epoch=measurement.epoch)
        batch = trained.training_batches(job.experiment.data.batch_size)[0]
        expected = sam_update_cosine(trained.network, F.cross_entropy, batch, rho=job.experiment.optim.rho)
        assert outcome.measured[measurement]["cosine"] == pytest.approx(expected, rel=1e-6)
    found = [facts["cosine"] for facts in outcome.measured.values()]
    assert len(set(found)) == len(job.measurements) == 2


PAPER = {  # network, dataset(s), epochs, batch size, rho, number of jobs
    "landscape": ({"resnet-56-noshort"}, {"cifar10"}, {300}, {128}, {0.0, 0.05}, 2 * 5),
    "hessian": ({"wrn-40-10"}, {"cifar10"}, {300}, {256}, {0.0, 0.05}, 2 * 5),
    "m-and-rho": ({"resnet-20"}, {"cifar10"}, {200}, {256}, {0.0, *settings.RHO_GRID}, 5 * (1 + 4 * 6)),
    "second-order": ({"wrn-40-2"}, {"cifar10"}, {200}, {256}, {0.05}, 2 * 5),
    "inner-steps": ({"wrn-28-10"}, {"cifar10", "cifar100"}, {200}, {256}, {0.05, 0.1}, 2 * 4 * 20),
    "bound": ({"wrn-28-10"}, {"cifar10"}, {200}, {256}, {0.0, 0.05}, 2 * 5),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_scale_has_the_papers_settings(name):
    jobs = planned_jobs(ITEMS[name].study, "paper")
    specs = [job.experiment for job in jobs]
    models, datasets, epochs, batch_sizes, rhos, num_jobs = PAPER[name]
    assert {e.model.name for e in specs} == models
    assert {e.data.name for e in specs} == datasets
    assert {e.epochs for e in specs} == epochs
    assert {e.data.batch_size for e in specs} == batch_sizes
    assert {e.optim.rho for e in specs} == rhos
    assert {(e.data.augment, e.data.drop_last, e.data.train_size) for e in specs} == {("basic", True, None)}
    assert {(e.optim.decay, e.optim.clip_norm, e.optim.schedule) for e in specs} == {("loss", 5.0, "cosine")}
    assert {e.model.norm for e in specs} == ({"none"} if name == "hessian" else {"batch"})
    assert len(jobs) == num_jobs


def test_the_hessians_network_keeps_few_of_its_weights():
    """They are 220 MB each: an epoch that is no multiple of the others would keep hundreds."""
    assert {e.keep_every for e in specs("paper", "hessian")} == {50}


@pytest.mark.parametrize("name", ["landscape", "hessian"])
def test_curvature_has_ten_replicas_on_a_laptop_and_tunes_rho_on_validation(name):
    jobs = planned_jobs(ITEMS[name].study, "laptop")
    tuning = [job for job in jobs if job.seed == TUNING_SEED]
    assert {job.experiment.optim.rho for job in tuning} == {0.05, 0.1, 0.2}
    assert {(job.experiment.data.validation, job.experiment.keep_every) for job in tuning} == {(0.1, None)}
    replicas = [(job.experiment.optim.rho > 0, job.seed) for job in jobs if job.seed != TUNING_SEED]
    assert sorted(replicas) == [(sam, seed) for sam in (False, True) for seed in range(10)]


def test_everything_at_laptop_scale_costs_at_most_18_million_passes():
    """When this was planned 8 million of them were done: at most 10 million were left."""
    jobs = {job.name: job for item in ALL_ITEMS.values() for job in planned_jobs(item.study, "laptop")}
    assert weighted_cost(jobs.values()) < 18e6


def test_what_is_cut_is_in_the_findings_of_its_item():
    assert CUTS.keys() <= ALL_ITEMS.keys()
    for name, cuts in CUTS.items():
        assert ALL_ITEMS[name].study("laptop", DryRunner()).cut == cuts
        assert not ALL_ITEMS[name].study("smoke", DryRunner()).cut


def test_the_runs_of_the_evidence_that_chose_settings_are_still_in_the_plan():
    runs = Path(__file__).parents[3] / "results" / "foret2021-laptop" / "runs"
    finished = {path.name for path in runs.glob(f"*-seed{TUNING_SEED}")}
    planned = {name for item in ALL_ITEMS.values() for name in plan(item.study, "laptop", ReadOnlyRunner(runs)).jobs}
    assert finished
    assert finished <= planned


def test_at_the_papers_scale_m_is_that_of_its_accelerators_or_the_figures_own():
    of = {name: {e.optim.m for e in specs("paper", name) if e.optim.rho} for name in PAPER}
    assert of == {
        "landscape": {16},
        "hessian": {32},
        "m-and-rho": {4, 16, 64, None},
        "second-order": {None},
        "inner-steps": {32},
        "bound": {32},
    }


def specs(scale, name):
    return [job.experiment for job in planned_jobs(ITEMS[name].study, scale)]


def test_perturbations_of_the_sup_norm_are_as_long_as_those_of_the_2_norm():
    num_weights = 36_479_194 - 258_560  # of WRN-28-10 without weights in its shortcuts
    found = {(e.optim.p, e.optim.direction, e.optim.rho) for e in specs("paper", "p-norm") if e.optim.rho}
    assert {rho for p, direction, rho in found if (p, direction) == (2.0, "gradient")} == set(settings.RHO_GRID)
    sup = sorted(rho * math.sqrt(num_weights) for p, _, rho in found if p == math.inf)
    np.testing.assert_allclose(sup, settings.RHO_GRID, rtol=1e-6)
    assert {rho for _, direction, rho in found if direction == "random"} > set(settings.RHO_GRID)
    assert {e.data.validation for e in specs("paper", "p-norm")} == {0.1}


LAPTOP_COST = {  # runs, passes over images
    "landscape": (23, 1_440_000),
    "hessian": (23, 1_440_000),
    "m-and-rho": (45, 3_400_000),
    "predictive": (48, 2_880_000),
    "second-order": (10, 1_200_000),
    "p-norm": (65, 5_000_000),
    "inner-steps": (20, 3_000_000),
    "bound": (10, 600_000),
}


@every_item
def test_what_an_item_costs_on_a_laptop_is_known(name):
    jobs = planned_jobs(ITEMS[name].study, "laptop")
    assert (len(jobs), cost(jobs)) == LAPTOP_COST[name]


@pytest.mark.parametrize("name", [name for name in ALL_ITEMS if name != "predictive"])  # whose networks are others'
def test_what_an_item_costs_at_the_papers_scale_is_known(name):
    jobs = planned_jobs(ALL_ITEMS[name].study, "paper")
    assert cost(jobs) > 0
    assert num_models(jobs) == len({job.name for job in jobs}) or name in ("label-noise", "noise-and-rho")


def test_the_network_whose_predictions_are_labels_counts_too():
    once = Experiment(data=Data(train_size=10))
    twice = dataclasses.replace(once, data=dataclasses.replace(once.data, bootstrap=True))
    assert num_models([Job(experiment=twice)]) == num_models([Job(experiment=twice), Job(experiment=once)]) == 2


def test_a_pass_costs_what_the_arithmetic_of_its_network_does():
    """A convolution of c channels takes a multiple of c^2 operations for each pixel: twice the width, four times it."""
    small, wide = (
        Experiment(data=Data(name="fashion-mnist", train_size=10), model=Model(name=n), epochs=1)
        for n in ("wrn-10-2", "wrn-10-4")
    )
    assert weighted_cost([Job(experiment=small)]) == 10
    assert 3.5 < weighted_cost([Job(experiment=wide)]) / 10 < 4
    large = dataclasses.replace(small, data=Data(name="cifar10", train_size=10))
    assert weighted_cost([Job(experiment=large)]) / 10 == pytest.approx((32 / 28) ** 2, rel=0.03)
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
    experiment = Experiment(data=Data(train_size=10), optim=optim, epochs=3)
    assert passes(Job(experiment=experiment)) == 3 * num_passes
    assert cost([Job(experiment=experiment)]) == 30 * num_passes


@pytest.mark.parametrize(("scale", "decay"), [("paper", 5e-4), ("laptop", None)])
def test_the_cosine_has_the_l2_term_where_the_loss_of_training_has_it(scale, decay):
    for job in planned_jobs(ITEMS["second-order"].study, scale):
        assert job.measurements
        assert {dict(m.settings).get("weight_decay") for m in job.measurements} == {decay}
