import numpy as np
import pytest
import torch

from flatmin.measures import m_sharpness
from measures import cases
from measures.cases import tanh_network, whole


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_with_a_shard_each_measure_the_whole(two_processes, tmp_path):
    results = two_processes.run(cases.measured_on_a_shard, str(tmp_path / "cache"))
    model, loss_fn, data = tanh_network()
    expected = cases.measured(whole(data), None)
    for found, again, _, _ in results:
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-12, err_msg=name)
        np.testing.assert_array_equal(found["landscape"], again["landscape"])
    ((x, y),) = whole(data)
    own = m_sharpness(model, loss_fn, [(x[:12], y[:12])]).mean  # without group= a rank measures its own shard
    assert results[0][2] == pytest.approx(own, rel=1e-10)
    # What fails on one rank is refused on all; nobody waits for ever.
    reasons = ("rank 1: Every tensor of a batch", "data is empty", "rank 1: The loss is nan", "cannot cross ranks")
    for *_, errors in results:
        for reason, error in zip(reasons, errors, strict=True):
            assert reason in error
