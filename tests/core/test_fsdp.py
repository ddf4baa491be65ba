"""FSDP2 with two gloo processes, against a single process on the whole batch."""

import math

import pytest
import torch

import fsdp_cases
import references
from flatmin import SAM
from flatmin.core.compat import TORCH

# Its name until torch 2.12.
GATHER = "all_gather_single" if TORCH >= (2, 13) else "all_gather_into_tensor"

SETTINGS = [
    {"rho": 0.3},
    {"rho": 0.3, "p": 1.0},
    {"rho": 0.3, "p": 3.0},
    {"rho": 0.1, "p": math.inf},
    {"rho": 0.3, "adaptive": 0.1},
    {"rho": 0.3, "ascent_steps": 3},
    {"rho": 0.3, "ascent_steps": 3, "p": 1.0, "adaptive": True},
    {"rho": 0.3, "direction": "random"},
    {"rho": 0.3, "weight": 2.5},
    {"rho": 0.3, "direction": "momentum"},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", ["closure", "perturbed"])
def test_the_trajectory_is_that_of_a_single_process(two_processes, settings, way):
    if way == "perturbed" and settings.get("ascent_steps", 1) > 1:
        way = "closure"
    results = two_processes.run(fsdp_cases.train, settings, way)
    expected = fsdp_cases.single_process(settings)
    for got in results:
        for value, reference in zip(got, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-12, equal_nan=True)


def test_a_part_of_the_batch_is_that_of_a_single_process(two_processes):
    """eps comes from the parts of both workers together, because FSDP2 reduces the gradients of every pass."""
    results = two_processes.run(fsdp_cases.train_on_a_part)
    model = fsdp_cases.make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)

    def closure_for(step, rows):
        batches = [fsdp_cases.batch(rank, step) for rank in range(2)]
        return references.closure_of(
            opt, lambda: sum(fsdp_cases.loss_of(model, (x[rows], y[rows])) for x, y in batches) / 2
        )

    for step in range(fsdp_cases.STEPS):
        opt.step(closure_for(step, slice(2)), rest=closure_for(step, slice(2, 8)), weights=[2, 6])
    for got in results:
        torch.testing.assert_close(got, fsdp_cases.weights(model), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", [{"p": 1.0}, {"p": 1.5}, {"p": 2.0}, {"p": math.inf}])
def test_the_norm_costs_one_collective_however_many_tensors(two_processes, settings):
    assert two_processes.run(fsdp_cases.collectives_of_one_perturbation, settings) == [[GATHER]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shards_are_restored_exactly_also_after_an_exception(two_processes, dtype):
    results = two_processes.run(fsdp_cases.restored_after_an_exception, dtype)
    assert any(moved for moved, _ in results)
    assert all(same for _, same in results)


def test_a_distributed_checkpoint_goes_on_in_lockstep(two_processes, tmp_path):
    for original, loaded in two_processes.run(fsdp_cases.checkpoint_round_trip, str(tmp_path)):
        assert torch.equal(original, loaded)
