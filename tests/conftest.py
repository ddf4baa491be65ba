"""What all tests share."""

import contextlib
import multiprocessing
import os

# Tests run in parallel processes already, and so do those that tests start: threads that wait for each other spin.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import pytest

from flatmin.core.compat import TORCH
from two_processes import WorkerProcesses

# Trainers, timm and peft import torchvision where it is installed, whose compiled operators may be missing.
with contextlib.suppress(ImportError):
    import flatmin.lab.data.torchvision_operators  # noqa: F401

# Processes that tests start are forked from one that has imported what takes seconds.
multiprocessing.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch._dynamo", "flatmin.lab.data.torchvision_operators", "flatmin.lab.sweeps.sweep"]
)
with contextlib.suppress(ImportError):
    from flatmin.lab.sweeps import local_pool

    local_pool.CONTEXT = multiprocessing.get_context("forkserver")

OF_OLDER_TORCH = (  # warnings that torch.distributed.checkpoint gives about itself, before torch 2.13 at the latest
    "torch.distributed is unavailable or uninitialized",
    "TypedStorage is deprecated",
)


def pytest_configure(config):
    for message in OF_OLDER_TORCH if TORCH < (2, 13) else ():
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


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
