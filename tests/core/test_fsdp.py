"""FSDP2 on two processes, HSDP and tensor parallelism on a mesh of 2 x 2, against one process in float64."""

import math

import pytest
import torch

import fsdp_cases
import mesh_cases
from flatmin import SAM, ascent_step
from flatmin.core.compat import TORCH
from fsdp_cases import STEPS, batch, generator_for, loss_of, weights
from references import closure_of, eq2, flat

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not available")

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


@pytest.mark.skipif(TORCH < (2, 7), reason="FSDP2 on the CPU cannot gather weights in a backward pass")
@pytest.mark.parametrize("how", ["not resharded", "read between the passes", "read in the second pass"])
def test_weights_that_fsdp_has_gathered_before_are_gathered_anew(two_processes, how):
    results = two_processes.run(fsdp_cases.train_with_gathered_weights, how)
    model = fsdp_cases.make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)
    for step in range(STEPS):
        opt.step(closure_of(opt, lambda: sum(loss_of(model, batch(rank, step)) for rank in range(2)) / 2))
    for got in results:
        torch.testing.assert_close(got, weights(model), rtol=1e-10, atol=1e-12)


def test_a_part_of_the_batch_is_that_of_a_single_process(two_processes):
    """eps comes from the parts of both workers together, because FSDP2 reduces the gradients of every pass."""
    results = two_processes.run(fsdp_cases.train_on_a_part)
    model = fsdp_cases.make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)

    def closure_for(step, rows):
        batches = [batch(rank, step) for rank in range(2)]
        return closure_of(opt, lambda: sum(loss_of(model, (x[rows], y[rows])) for x, y in batches) / 2)

    for step in range(STEPS):
        opt.step(closure_for(step, slice(2)), rest=closure_for(step, slice(2, 8)), weights=[2, 6])
    for got in results:
        torch.testing.assert_close(got, weights(model), rtol=1e-10, atol=1e-12)


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


# HSDP, and FSDP2 with tensor parallelism, on four processes.

MESH_SETTINGS = [
    {"rho": 0.3},
    {"rho": 0.3, "p": 1.0},
    {"rho": 0.3, "p": math.inf},
    {"rho": 1.0, "adaptive": 0.01},
    {"rho": 0.3, "ascent_steps": 2},
    {"rho": 0.3, "direction": "random"},
]


def reference(num_batches, settings):
    """Train one process on the examples of all data-parallel ranks."""
    model = mesh_cases.make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **settings, **generator_for(settings))
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(batch(r, step) for r in range(num_batches)), strict=True))
        opt.step(closure_of(opt, lambda: loss_of(model, (x, y))))
    return weights(model), opt.metrics.perturbation_norm, opt.metrics.grad_norm


@pytest.mark.parametrize("settings", MESH_SETTINGS, ids=str)
@pytest.mark.parametrize(("kind", "num_batches"), [("hsdp", 4), ("tensor parallelism", 2)])
def test_mesh_equals_one_process(four_processes, kind, num_batches, settings):
    """One eps for all ranks, and every weight counted once in its norm: replicas not twice, shards not once each."""
    expected = reference(num_batches, settings)
    for found in four_processes.run(mesh_cases.train, kind, {**settings, "sync_perturbation": True}):
        for value, known in zip(found, expected, strict=True):
            torch.testing.assert_close(value, known, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", ["hsdp", "tensor parallelism"])
def test_two_passes_equal_a_closure(four_processes, kind):
    closure = four_processes.run(mesh_cases.train, kind, {"rho": 0.3, "sync_perturbation": True})
    for found, known in zip(four_processes.run(mesh_cases.train, kind, {"rho": 0.3}, "passes"), closure, strict=True):
        torch.testing.assert_close(found[0], known[0], rtol=0, atol=0)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_norm_is_joint_over_every_placement(four_processes, p):
    for moved, grads in four_processes.run(mesh_cases.placements, p):
        for found, known in zip(moved, ascent_step(grads, rho=0.3, p=p), strict=True):
            torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_on_one_rank_perturbs_none(four_processes, bad):
    for moved, _ in four_processes.run(mesh_cases.placements, 2.0, bad):
        assert flat(moved).abs().max() == 0


# HSDP without sync_perturbation: one eps per replica, which is two ranks here.


def replica_batch(replica, step, rows=slice(None)):
    """Return the examples of both ranks of a replica."""
    pieces = [batch(rank, step) for rank in (2 * replica, 2 * replica + 1)]
    return torch.cat([x[rows] for x, _ in pieces]), torch.cat([y[rows] for _, y in pieces])


def gradient_at(model, point, data):
    torch.nn.utils.vector_to_parameters(point, model.parameters())
    grads = torch.autograd.grad(loss_of(model, data), list(model.parameters()))
    return flat(grads)


def by_hand(p, rho):
    """Train on mean_r g_r(w + eps_r), with eps_r from the gradient of replica r (Eq. 2)."""
    model = mesh_cases.make_model()
    w = weights(model).clone()
    momentum = torch.zeros_like(w)
    for step in range(STEPS):
        total = torch.zeros_like(w)
        for replica in range(2):
            data = replica_batch(replica, step)
            eps = eq2(gradient_at(model, w, data), rho, p)
            total += gradient_at(model, w + eps, data) / 2
        momentum = 0.9 * momentum + total
        w = w - 0.1 * momentum
    return w


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_hsdp_has_one_perturbation_per_replica(four_processes, p):
    expected = by_hand(p, 0.3)
    shared = reference(4, {"rho": 0.3, "p": p})[0]
    assert (expected - shared).abs().max() > 1e-3  # one eps for all would be seen
    for found, *_ in four_processes.run(mesh_cases.train, "hsdp", {"rho": 0.3, "p": p}):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def micro_batches(settings, slices, rest=None):
    """Train one process with one closure per replica and slice of its batch: the same perturbations."""
    model = mesh_cases.make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **settings)

    def closure_for(step, replica, rows):
        return closure_of(opt, lambda: loss_of(model, replica_batch(replica, step, rows)))

    for step in range(STEPS):
        closures = [closure_for(step, replica, rows) for replica in range(2) for rows in slices]
        if rest is None:
            opt.step(closures)
        else:
            x, y = (torch.cat(parts) for parts in zip(*(replica_batch(r, step, rest) for r in range(2)), strict=True))
            opt.step(closures, rest=closure_of(opt, lambda: loss_of(model, (x, y))), weights=[1, 1, 6])
    return weights(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"rho": 1.0, "adaptive": 0.01},
        {"rho": 0.3, "ascent_steps": 2},
        {"rho": 0.3, "weight": 2.5},
    ],
    ids=str,
)
def test_hsdp_equals_one_closure_per_replica(four_processes, settings):
    expected = micro_batches(settings, [slice(None)])
    for found, *_ in four_processes.run(mesh_cases.train, "hsdp", settings):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "slices", "rest"), [("list", [slice(4), slice(4, 8)], None), ("part", [slice(2)], slice(2, 8))]
)
def test_hsdp_takes_micro_batches_and_parts(four_processes, way, slices, rest):
    expected = micro_batches({"rho": 0.3}, slices, rest)
    for found, *_ in four_processes.run(mesh_cases.train, "hsdp", {"rho": 0.3}, way):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "settings", "times"),
    [
        ("closure", {"rho": 0.3}, 1),
        ("closure", {"rho": 0.3, "ascent_steps": 2}, 1),
        ("closure", {"rho": 0.3, "weight": 2.5}, 1),
        ("list", {"rho": 0.3}, 1),
        ("closure", {"rho": 0.3, "sync_perturbation": True}, 2),
        ("closure", {"rho": 0.0}, 1),
    ],
)
def test_gradients_cross_replicas_once_a_step(four_processes, way, settings, times):
    """Each of the two layers is a parameter group of FSDP2, with one reduction of what a rank has of it."""
    # Half of the first layer, and the row of the last one.
    of_a_rank = mesh_cases.HIDDEN // 2 * (3 + 1) + mesh_cases.HIDDEN + 1
    for numel, calls in four_processes.run(mesh_cases.numbers_reduced, way, settings):
        assert calls == 2 * times
        assert numel <= of_a_rank * times


def test_random_directions_are_alike_within_a_replica_only(four_processes):
    a, b, c, d = four_processes.run(mesh_cases.own_directions, False)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert (a - c).abs().max() > 1e-3
    assert a.norm() == pytest.approx(0.05)
    first, *others = four_processes.run(mesh_cases.own_directions, True)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.skipif(TORCH < (2, 8), reason="FSDPModule.set_gradient_divide_factor is new in torch 2.8")
def test_divide_factor_of_the_user_counts_all_ranks(four_processes):
    """The gradient is the sum over ranks divided by it, whether FSDP2 or SAM sums over the replicas."""
    closure = four_processes.run(mesh_cases.divided_by, "closure", 2.0)
    for found, known in zip(four_processes.run(mesh_cases.divided_by, "list", 2.0), closure, strict=True):
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


def test_replicas_are_reduced_again_after_an_exception(four_processes):
    assert four_processes.run(mesh_cases.failing_first_pass) == [2] * 4
