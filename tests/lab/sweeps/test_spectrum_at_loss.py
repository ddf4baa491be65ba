"""The Hessian where the training loss first falls below a value: which epoch that is, and its eigenvalues."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatmin.lab.errors import RunError, SpecError
from flatmin.lab.runs.record import read_record
from flatmin.lab.spec.experiment import Model
from flatmin.lab.sweeps.jobs import Job, run_job
from flatmin.lab.sweeps.measurements import Spectrum, measure_run
from flatmin.lab.sweeps.spectrum_at_loss import SpectrumAtLoss, first_below
from flatmin.lab.training.engine import train
from flatmin.lab.training.trained_model import load_trained
from measures.cases import dense_hessian
from sweep_process import tiny

# 64 * 4 + 4 + 4 * 10 + 10 = 310 weights: their dense Hessian is a matter of a moment.
KEPT = replace(tiny(epochs=8, augment="basic"), model=Model(name="mlp-1-4"), keep_every=1)


@pytest.mark.parametrize(
    ("losses", "epochs"),
    [
        ([2.0, 0.25, 0.09, 0.02], {0.3: 2, 0.1: 3, 0.03: 4}),
        ([0.02, 0.01], {0.3: 1, 0.1: 1, 0.03: 1}),  # at the first epoch
        ([2.0, 0.3, 0.1], {0.3: 3, 0.1: None, 0.03: None}),  # as large as a limit is not below it; never
        ([0.2, 0.9, 0.05, 0.5, 0.2, 0.01], {0.3: 1, 0.1: 3, 0.03: 6}),  # rises in between: the first time counts
        ([2.0, math.nan, math.inf, 0.2], {0.3: 4, 0.1: None, 0.03: None}),
        ([], {0.3: None, 0.1: None, 0.03: None}),
    ],
)
def test_the_first_epoch_whose_loss_is_below_a_limit(losses, epochs):
    found = first_below(enumerate(losses, start=1), list(epochs))
    assert {limit: at and at[0] for limit, at in found.items()} == epochs
    assert all(at is None or at[1] == losses[at[0] - 1] for at in found.values())


def test_it_is_what_a_look_at_all_epochs_says():
    draw = random.Random(0)
    for _ in range(200):
        losses = [draw.uniform(0.0, 1.0) for _ in range(draw.randint(0, 12))]
        limits = [draw.uniform(0.0, 1.0) for _ in range(3)]
        below = {limit: [(e, v) for e, v in enumerate(losses, start=1) if v < limit] for limit in limits}
        expected = {limit: min(found, default=None) for limit, found in below.items()}
        assert first_below(enumerate(losses, start=1), limits) == expected


def test_no_epoch_is_read_after_the_last_limit():
    read = []

    def losses():
        for epoch, loss in enumerate([0.5, 0.2, 0.4, 0.05, 0.01], start=1):
            read.append(epoch)
            yield epoch, loss

    first_below(losses(), [0.3, 0.1])
    assert read == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run whose loss falls for eight epochs."""
    runs = tmp_path_factory.mktemp("runs")
    train(KEPT, seed=3, runs=runs)
    return runs / KEPT.run_name(3)


def evaluated(run, epoch):
    """Return a model in float64, all training images as they are, and their mean loss."""
    trained = load_trained(run, epoch=epoch)
    batches = trained.batches(trained.dataset.train)
    inputs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    network = trained.network.double()
    with torch.no_grad():
        return network, [(inputs.double(), labels)], F.cross_entropy(network(inputs.double()), labels).item()


def test_eigenvalues_are_those_of_the_dense_hessian_of_all_images_at_the_first_epoch_below(run):
    by_epoch = {epoch: evaluated(run, epoch)[2] for epoch in range(1, 9)}
    assert by_epoch[8] < by_epoch[2] < by_epoch[1]
    limits = (by_epoch[1] + 1.0, by_epoch[3] * 1.0001, min(by_epoch.values()) / 2)  # at once, later, never
    first = {limit: next((e for e, loss in by_epoch.items() if loss < limit), None) for limit in limits}
    measurement = SpectrumAtLoss(limits=limits)
    facts = measure_run(run, [measurement])[measurement.name]
    np.testing.assert_allclose(facts["losses"], list(by_epoch.values()), rtol=1e-5)  # all: the last is never passed
    assert (facts["num_examples"], facts["keep_every"], facts["epoch"]) == (40, 1, 8)
    assert facts["at_loss"][f"{limits[2]:g}"] is None
    for limit in limits[:2]:
        at = facts["at_loss"][f"{limit:g}"]
        assert at["epoch"] == first[limit] != 8
        assert at["loss"] == pytest.approx(by_epoch[first[limit]], rel=1e-5)
        network, data, _ = evaluated(run, first[limit])
        values = torch.linalg.eigvalsh(dense_hessian(network, F.cross_entropy, data)).flip(0).numpy()
        np.testing.assert_allclose(at["eigenvalues"], values[:5], rtol=1e-4)
        assert at["lambda_max"] == at["eigenvalues"][0]
        assert at["lambda_1_over_lambda_5"] == pytest.approx(values[0] / values[4], rel=1e-4)
        assert at["converged"]


def test_it_stops_at_the_lowest_limit_and_looks_at_saved_epochs_alone(tmp_path):
    every_other = replace(KEPT, keep_every=2)
    train(every_other, seed=3, runs=tmp_path)
    run = tmp_path / every_other.run_name(3)
    losses = {epoch: evaluated(run, epoch)[2] for epoch in (2, 4, 6, 8)}
    measurement = SpectrumAtLoss(limits=(10.0, losses[4] * 1.0001), num_eigenvalues=1)
    facts = measure_run(run, [measurement])[measurement.name]
    assert [at["epoch"] for at in facts["at_loss"].values()] == [2, 4]
    np.testing.assert_allclose(facts["losses"], [losses[2], losses[4]], rtol=1e-5)
    assert facts["at_loss"]["10"]["lambda_1_over_lambda_5"] is None


def test_a_sweep_measures_it_and_reads_it_back_with_nulls(tmp_path):
    measurement = SpectrumAtLoss(limits=(10.0, 1e-9), num_eigenvalues=2)
    job = Job(experiment=replace(KEPT, epochs=1), measurements=(measurement,))
    assert run_job(job, tmp_path, None, 600.0).kind == "done"
    record = read_record(job.name, tmp_path)
    assert job.is_complete(record)
    found = record.measured[measurement.name]["at_loss"]
    assert (found["10"]["epoch"], found["1e-09"]) == (1, None)


def test_a_run_that_did_not_save_its_weights_cannot_be_measured(tmp_path):
    job = Job(experiment=replace(KEPT, epochs=1, keep_every=None))
    assert run_job(job, tmp_path, None, 600.0).kind == "done"
    with pytest.raises(RunError, match="has not saved its weights after epoch 1: train with keep_every"):
        measure_run(tmp_path / job.name, [SpectrumAtLoss()])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "--epoch must be left out, because the loss chooses it; got 3"),
        ({"limits": ()}, "--limits must be one or several positive numbers; got"),
        ({"limits": (0.3, -1.0)}, "--limits must be one or several positive numbers"),
        ({"num_eigenvalues": 0}, "--num-eigenvalues must be at least 1; got 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings, message):
    with pytest.raises(SpecError, match=message):
        SpectrumAtLoss(**settings)


def test_stored_spectra_keep_their_names():
    assert Spectrum(steps=30, probes=1, num_examples=200).name == "spectrum-eacbd58fae"
