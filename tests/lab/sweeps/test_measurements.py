"""What a sweep measures of a run: one file each, whole or not there, and nothing read twice."""

import errno
import json
import os
from dataclasses import replace

import pytest

from flatmin.lab.errors import StorageError
from flatmin.lab.runs import directory as run_directory
from flatmin.lab.sweeps.jobs import Job, Measurement, read_outcome
from flatmin.lab.sweeps.measurements import MEASURES, measure_cosine, measurement_settings
from flatmin.lab.sweeps.run_job import run_job
from flatmin.lab.training import trained_model as trained
from flatmin.lab.training.engine import train
from flatmin.lab.training.trained_model import load_trained
from sweep_process import tiny

EXAMPLES = (("num_examples", 20),)
MEASUREMENTS = (
    Measurement(kind="cosine", settings=(("rho", 0.1), *EXAMPLES), epoch=1),
    Measurement(kind="cosine", settings=(("rho", 0.1), *EXAMPLES), epoch=2),
    Measurement(kind="spectrum", settings=(("steps", 4), ("probes", 1), *EXAMPLES), epoch=1),
    Measurement(kind="sharpness", settings=EXAMPLES),
    Measurement(kind="landscape", settings=(("points", 3), *EXAMPLES)),
    Measurement(kind="bound", settings=EXAMPLES),
    Measurement(kind="bound", settings=(("rho", 0.2), *EXAMPLES)),
    Measurement(kind="noise", settings=(("num_draws", 3), *EXAMPLES)),
)


@pytest.fixture
def job(tmp_path):
    job = Job(experiment=replace(tiny(epochs=3), keep_every=1), measurements=MEASUREMENTS)
    train(job.experiment, runs=tmp_path)
    return job


def noted_calls(monkeypatch, module, name):
    function, calls = getattr(module, name), []

    def noting(*arguments, **keywords):
        calls.append(arguments)
        return function(*arguments, **keywords)

    monkeypatch.setattr(module, name, noting)
    return calls


def test_all_measurements_of_a_run_read_its_dataset_and_the_weights_of_each_epoch_once(job, tmp_path, monkeypatch):
    datasets = noted_calls(monkeypatch, trained, "load_dataset")
    weights = noted_calls(monkeypatch, trained, "_load_weights")
    assert run_job(job, tmp_path, None, 60.0).kind == "done"
    assert len(datasets) == 1
    assert sorted(arguments[2] or 99 for arguments in weights) == [1, 2, 99]


def test_a_measurement_beside_others_finds_what_it_finds_alone(job, tmp_path):
    assert run_job(job, tmp_path, None, 60.0).kind == "done"
    found = read_outcome(job, tmp_path).measured
    assert list(found) == list(MEASUREMENTS)
    for measurement in MEASUREMENTS:
        alone = load_trained(tmp_path / job.name, epoch=measurement.epoch)
        measure = MEASURES[measurement.kind][0]
        facts = measure(alone, tmp_path / "alone" / measurement.kind, **measurement_settings(measurement))
        assert found[measurement] == json.loads(json.dumps(facts), parse_constant=lambda _: None), measurement


def test_each_measurement_has_one_file_of_facts(job, tmp_path):
    run_job(job, tmp_path, None, 60.0)
    folder = tmp_path / job.name / "measures"
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*.json")} == {m.file_name() for m in MEASUREMENTS}
    assert len(list(folder.rglob("*.svg"))) == 5  # a cosine has no picture


def test_facts_that_cannot_be_written_leave_those_of_before(job, tmp_path, monkeypatch):
    network = load_trained(tmp_path / job.name)
    target = tmp_path / "measures" / "cosine"
    measure_cosine(network, target, rho=0.1, num_examples=20)
    before = target.with_suffix(".json").read_bytes()
    assert json.loads(before)["rho"] == 0.1

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_directory.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        measure_cosine(network, target, rho=0.2, num_examples=20)
    assert target.with_suffix(".json").read_bytes() == before


def test_a_folder_that_cannot_be_written_to_is_named(job, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/measures"):
        measure_cosine(load_trained(tmp_path / job.name), tmp_path / "file/measures/cosine", rho=0.1, num_examples=20)
