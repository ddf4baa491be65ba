"""Deterministic algorithms, if asked for."""

import os

import pytest
import torch

from flatmin.cli import main
from flatmin.lab.training import run
from flatmin.lab.training.precision import deterministic_algorithms


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


def test_algorithms_are_as_before_after_an_error(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
