"""What all tests share."""

import pytest
import torch

from two_processes import TwoProcesses


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run in parallel processes already."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_processes():
    """Two processes of a gloo group that run functions side by side, started once."""
    processes = TwoProcesses()
    yield processes
    processes.close()
