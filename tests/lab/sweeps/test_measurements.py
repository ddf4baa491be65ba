"""What is measured of a run: one file each, complete or absent, and nothing read or measured twice."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flatmin.lab.errors import StorageError
from flatmin.lab.runs.record import read_record
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Bound, Cosine, Landscape, Noise, Sharpness, Spectrum, measure_run
from flatmin.lab.sweeps.run_job import run_job
from flatmin.lab.training import trained_model
from flatmin.lab.training.engine import train
from sweep_process import tiny

MEASUREMENTS = (
    Cosine(rho=0.1, num_examples=20, epoch=1),
    Cosine(rho=0.1, num_examples=20, epoch=2),
    Spectrum(steps=4, probes=1, num_examples=20, epoch=1),
    Sharpness(num_examples=20),
    Landscape(points=3, num_examples=20),
    Bound(num_examples=20),
    Bound(num_examples=20, rho=0.2),
    Noise(num_draws=3, num_examples=20),
)


@pytest.fixture
def job(tmp_path):
    job = Job(experiment=replace(tiny(epochs=3), keep_every=1), measurements=MEASUREMENTS)
    train(job.experiment, runs=tmp_path)
    return job


def noted_calls(monkeypatch, name):
    function, calls = getattr(trained_model, name), []

    def noting(*arguments, **keywords):
        calls.append(arguments)
        return function(*arguments, **keywords)

    monkeypatch.setattr(trained_model, name, noting)
    return calls


def test_all_measurements_of_a_run_read_its_dataset_and_each_epochs_weights_once(job, tmp_path, monkeypatch):
    datasets, weights = (noted_calls(monkeypatch, name) for name in ("load_dataset", "_load_weights"))
    assert run_job(job, tmp_path, None, 60.0).kind == "done"
    assert len(datasets) == 1
    assert sorted(arguments[2] or 99 for arguments in weights) == [1, 2, 99]
    files = {path.relative_to(tmp_path / job.name / "measures").as_posix() for path in tmp_path.rglob("measures/*")}
    names = {m.name for m in MEASUREMENTS}
    assert {file.removesuffix(".json") for file in files if file.endswith(".json")} == names
    assert sum(file.endswith(".svg") for file in files) == 5  # cosines and noise have no plot
    measured = read_record(job.name, tmp_path).measured
    assert measured.keys() == names
    # Whoever asks next, for one or for all, gets the same facts, and nothing is measured again.
    monkeypatch.setattr(trained_model, "load_trained", None)
    assert measure_run(tmp_path / job.name, MEASUREMENTS) == measured
    assert measure_run(tmp_path / job.name, MEASUREMENTS[3:4]) == {n: f for n, f in measured.items() if "sharp" in n}


def test_a_measurement_among_others_finds_what_it_finds_alone(job, tmp_path):
    together = measure_run(tmp_path / job.name, MEASUREMENTS)
    for file in tmp_path.rglob("measures/*"):
        file.unlink()
    for measurement in MEASUREMENTS:
        assert measure_run(tmp_path / job.name, [measurement]) == {measurement.name: together[measurement.name]}


def test_facts_that_cannot_be_written_are_an_error_and_leave_nothing(job, tmp_path, monkeypatch):
    run, measurement = tmp_path / job.name, MEASUREMENTS[0]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(os, "fsync", full)
        measure_run(run, [measurement])
    assert list((run / "measures").iterdir()) == []
    (run / "measures").rmdir()
    (run / "measures").touch()
    with pytest.raises(StorageError, match=f"{run.name}/measures cannot be written to"):
        measure_run(run, [measurement])
    (run / "measures").unlink()
    assert measure_run(run, [measurement])[measurement.name]["rho"] == 0.1


def test_a_run_may_be_the_current_directory(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / job.name)
    assert measure_run(Path(), MEASUREMENTS[:1]) == measure_run(Path(), MEASUREMENTS[:1])
