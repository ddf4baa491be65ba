"""HSDP, and FSDP2 with tensor parallelism, on four processes in a mesh of 2 x 2, against one process in float64."""

import math

import pytest
import torch

import mesh_cases
from flatmin import SAM, ascent_step
from fsdp_cases import STEPS, batch, generator_for, loss_of, weights
from mesh_cases import make_model

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not available")

SETTINGS = [
    {"rho": 0.3},
    {"rho": 0.3, "p": 1.0},
    {"rho": 0.3, "p": math.inf},
    {"rho": 1.0, "adaptive": 0.01},
    {"rho": 0.3, "ascent_steps": 2},
    {"rho": 0.3, "direction": "random"},
]


def reference(num_batches, settings):
    """Train one process on the examples of all data-parallel ranks."""
    model = make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **settings, **generator_for(settings))
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(batch(r, step) for r in range(num_batches)), strict=True))

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = loss_of(model, (x, y))
            loss.backward()
            return loss

        opt.step(closure)
    return weights(model), opt.metrics.perturbation_norm, opt.metrics.grad_norm


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("kind", "num_batches"), [("hsdp", 4), ("tensor parallelism", 2)])
def test_mesh_equals_one_process(four_processes, kind, num_batches, settings):
    """One eps for all ranks, and every weight counted once in its norm: replicas not twice, shards not once each."""
    expected = reference(num_batches, settings)
    for found in four_processes.run(mesh_cases.train, kind, settings):
        for value, known in zip(found, expected, strict=True):
            torch.testing.assert_close(value, known, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", ["hsdp", "tensor parallelism"])
def test_two_passes_equal_a_closure(four_processes, kind):
    closure = four_processes.run(mesh_cases.train, kind, {"rho": 0.3})
    for found, known in zip(four_processes.run(mesh_cases.train, kind, {"rho": 0.3}, "passes"), closure, strict=True):
        torch.testing.assert_close(found[0], known[0], rtol=0, atol=0)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_norm_is_joint_over_every_placement(four_processes, p):
    for moved, grads in four_processes.run(mesh_cases.placements, p):
        for found, known in zip(moved, ascent_step(grads, rho=0.3, p=p), strict=True):
            torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)
