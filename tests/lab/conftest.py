"""What all tests of the lab share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side: one thread each is faster than all fighting for all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
