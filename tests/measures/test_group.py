import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flatmin
from flatmin.measures import (
    GGNOperator,
    HessianOperator,
    average_sharpness,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    spectral_density,
    top_eigenvalues,
)
from measures.cases import tanh_network, whole


def measured(data, group, cache=None):
    """Every measure of one network, as arrays."""
    model, loss_fn, _ = tanh_network()
    op = HessianOperator(model, loss_fn, data, group=group)
    found = {
        "product": (op @ torch.arange(65, dtype=torch.float64)).numpy(),
        "gauss-newton": GGNOperator(model, loss_fn, data, group=group).trace(probes=3),
        "top": top_eigenvalues(op, k=3, tol=1e-8).values,
        "trace": op.trace(probes=3),
        "density": spectral_density(op, steps=10).nodes,
        "sharpness of all": m_sharpness(model, loss_fn, data, group=group, steps=2).mean,
        "average sharpness": average_sharpness(model, loss_fn, data, rho=0.5, num_draws=2, group=group).per_draw,
        "error": m_sharpness(model, loss_fn, data, group=group, rho=1.0, metric="error").mean,
        "bound": pac_bayes_bound(model, loss_fn, data, group=group, rho=0.1, metric="error").total,
        "landscape": loss_landscape(model, loss_fn, data, group=group, dims=1, points=3, cache=cache).loss,
    }
    some = m_sharpness(model, loss_fn, data, group=group, m=4)
    found |= {"per subset": some.per_subset, "mean": some.mean, "error of the mean": some.standard_error}
    return found


WORKER = """
import sys
import numpy as np
import torch
import torch.distributed as dist
from measures.cases import tanh_network, whole
from measures.test_group import measured
from flatmin.measures import m_sharpness

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
model, loss_fn, data = tanh_network()
((x, y),) = whole(data)
shard = slice(0, 12) if rank == 0 else slice(12, 20)
data = list(zip(x[shard].split(5), y[shard].split(5)))
if rank == 1:
    data = [(x[shard], y[shard])]  # one batch here, three there
found = measured(data, dist.group.WORLD, cache=f"{folder}/cache")
again = measured(data, dist.group.WORLD, cache=f"{folder}/cache")
assert np.array_equal(found["landscape"], again["landscape"])
np.savez(f"{folder}/{rank}.npz", **found)

# What fails on one rank is refused on all; nobody waits for ever.
for bad, message in (
    ([(x, y[:3])] if rank == 1 else data, "rank 1: Every tensor of a batch"),
    ([], "data is empty"),
    ([(x * torch.inf, y)] if rank == 1 else data, "rank 1: The loss is nan"),
):
    try:
        m_sharpness(model, loss_fn, bad, m=2, group=dist.group.WORLD)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
try:
    m_sharpness(model, loss_fn, data, m=9, group=dist.group.WORLD)
except ValueError as error:
    assert "a subset cannot cross ranks" in str(error), error
else:
    raise AssertionError("m = 9")
alone = m_sharpness(model, loss_fn, data)  # without group= a rank measures its own shard
np.savez(f"{folder}/alone{rank}.npz", mean=alone.mean)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_with_a_shard_each_measure_the_whole(tmp_path):
    roots = [str(Path(flatmin.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        errors = rank.communicate()[1]
        assert rank.returncode == 0, errors
    _, _, data = tanh_network()
    expected = measured(whole(data), None)
    for rank in range(2):
        found = np.load(tmp_path / f"{rank}.npz", allow_pickle=False)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-12, err_msg=name)
    model, loss_fn, _ = tanh_network()
    ((x, y),) = whole(data)
    own = m_sharpness(model, loss_fn, [(x[:12], y[:12])]).mean
    assert np.load(tmp_path / "alone0.npz")["mean"] == pytest.approx(own, rel=1e-10)
