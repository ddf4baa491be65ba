"""What all tests share."""

import pytest
import torch

from flatmin.core.compat import TORCH
from two_processes import WorkerProcesses

OF_OLDER_TORCH = (  # warnings that torch.distributed.checkpoint gives about itself, before torch 2.13 at the latest
    "torch.distributed is unavailable or uninitialized",
    "TypedStorage is deprecated",
)


def pytest_configure(config):
    for message in OF_OLDER_TORCH if TORCH < (2, 13) else ():
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run in parallel processes already."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_processes():
    """Two processes of a gloo group that run functions side by side, started once."""
    processes = WorkerProcesses(2)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def four_processes():
    """Four of them, for meshes of 2 x 2."""
    processes = WorkerProcesses(4)
    yield processes
    processes.close()


@pytest.fixture
def nothing_outside(tmp_path, monkeypatch):
    """No dataset of this machine is found, nothing is downloaded, and what is written stays in the test's folder."""
    from cli_cases import in_an_empty_folder  # needs the lab, which is not everywhere installed

    in_an_empty_folder(tmp_path, monkeypatch)
