"""Deterministic algorithms, if asked for."""

import os

import pytest
import torch

from flatmin.cli import main
from flatmin.lab.sweeps import run_job as run_job_module
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Cosine
from flatmin.lab.training import run
from flatmin.lab.training.precision import deterministic_algorithms
from sweep_process import tiny


@pytest.mark.parametrize("flag", [(), ("--deterministic",)])
def test_flag_turns_deterministic_algorithms_on_for_training_only(flag, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    step, seen = run.Stepper.step, []

    def recorded(self, *arguments):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return step(self, *arguments)

    monkeypatch.setattr(run.Stepper, "step", recorded)
    arguments = ["--data.train-size", "20", "--model.name", "cnn-2", "--epochs", "1", "--output", "quiet"]
    assert main(["train", *arguments, "--runs", str(tmp_path), *flag]) == 0
    assert set(seen) == {(bool(flag), ":4096:8" if flag else None)}
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_jobs_train_and_measure_with_deterministic_algorithms(deterministic, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen = []

    def record(owner, name):
        function = getattr(owner, name)

        def recorded(*arguments):
            seen.append((name, torch.are_deterministic_algorithms_enabled()))
            return function(*arguments)

        monkeypatch.setattr(owner, name, recorded)

    record(run.Stepper, "step")
    record(run_job_module, "measure_run")
    job = Job(experiment=tiny(), measurements=(Cosine(num_examples=20),))
    assert run_job_module.run_job(job, tmp_path, None, 60.0, deterministic).kind == "done"
    assert set(seen) == {("step", deterministic), ("measure_run", deterministic)}
    assert not torch.are_deterministic_algorithms_enabled()


def test_algorithms_are_as_before_after_an_error(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
