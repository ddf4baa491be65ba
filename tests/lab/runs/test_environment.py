"""What a session records of the machine it ran on."""

import torch

from flatmin.lab.runs.environment import environment


def test_the_version_of_torch_names_its_build(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")  # the package's metadata say 2.13.0
    assert environment()["torch"] == "2.13.0+cu130"
