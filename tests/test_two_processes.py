"""The pair of processes that other tests use."""

import pytest

from two_processes import WorkerProcesses


def test_a_pair_that_failed_can_be_closed_and_used_again():
    pair = WorkerProcesses(2)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        pair.run(divmod, 0)  # divmod(rank, 0)
    pair.close()
    assert pair.run(max, 5) == [5, 5]
    pair.close()
