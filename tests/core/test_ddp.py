"""DistributedDataParallel with two gloo processes, against a single process that re-derives both in float64."""

import copy

import pytest
import torch

import ddp_cases


def gradient(model, params, buffers, batch, use_extra):
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    buffers = copy.deepcopy(buffers)
    out = torch.func.functional_call(model, (leaves, buffers), (batch[0], use_extra))
    grads = torch.autograd.grad(((out - batch[1]) ** 2).mean(), list(leaves.values()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]


def reference(way, sync, layer, unused, weight):
    """Train one process on the mean over workers of g + c (g(w + eps) - g), eps = 0.3 g / |g| of a worker or of both.

    Also return the buffers of both workers after each step: of the passes at w, or of the rest.
    """
    model = ddp_cases.make_model(layer, unused)
    buffers = {name: b.clone() for name, b in model.named_buffers()}  # rank 0's, which DDP broadcasts
    history = []
    in_pieces = way in ("list", "rest")
    shares = [n / sum(ddp_cases.SIZES) for n in ddp_cases.SIZES] if in_pieces else [1.0]
    for step in range(ddp_cases.STEPS):
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
        total = [torch.zeros_like(p) for p in params.values()]
        now = [copy.deepcopy(buffers) for _ in range(2)]
        for number, share in enumerate(shares):
            is_rest = way == "rest" and number == 1
            at_w, batches = [], []
            for rank in range(2):
                pieces = ddp_cases.micro_batches(rank, step)
                batches.append(pieces[number] if in_pieces else ddp_cases.whole_batch(rank, step))
                at_w.append(gradient(model, params, now[rank], batches[rank], unused and rank == 0))
            mean = [(a + b) / 2 for a, b in zip(*at_w, strict=True)]
            for rank in range(2):
                use_extra, g = unused and rank == 0, at_w[rank]
                if not is_rest:
                    up = mean if sync else g
                    norm = torch.cat([t.reshape(-1) for t in up]).norm()
                    moved = {name: p + 0.3 * t / norm for (name, p), t in zip(params.items(), up, strict=True)}
                    c = weight if weight is not None else 1 / share if way == "rest" else 1.0
                    perturbed = gradient(model, moved, now[rank], batches[rank], use_extra)
                    g = [a + c * (b - a) for a, b in zip(g, perturbed, strict=True)]
                total = [t + share * a / 2 for t, a in zip(total, g, strict=True)]
                if way != "rest" or is_rest:
                    torch.func.functional_call(model, (params, now[rank]), (batches[rank][0], use_extra))
        with torch.no_grad():
            for p, g in zip(model.parameters(), total, strict=True):
                p -= 0.1 * g
        history.append(now)
        buffers = now[0]
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), history


@pytest.mark.parametrize(
    ("way", "settings", "num_reductions"),
    [
        *((way, {"sync_perturbation": False}, 1) for way in ("closure", "list", "perturbed")),
        *((way, {"sync_perturbation": True}, n) for way, n in (("closure", 2), ("list", 3), ("perturbed", 2))),
        *(("rest", {}, 1), ("rest", {"weight": 1.0}, 1), ("closure", {"weight": 2.5}, 1)),
    ],
)
@pytest.mark.parametrize(
    ("ddp_settings", "layer", "unused"),
    [
        ({}, "batch norm", False),
        ({}, "memory", False),
        ({"gradient_as_bucket_view": True}, None, False),
        ({"find_unused_parameters": True}, None, True),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, "batch norm", True),
    ],
)
def test_two_workers_equal_one_process(two_processes, way, settings, num_reductions, ddp_settings, layer, unused):
    """Weights and buffers; and how often gradients are reduced."""
    results = two_processes.run(ddp_cases.train, way, settings, ddp_settings, layer, unused)
    sync = settings.get("sync_perturbation", False)
    weights, buffers = reference(way, sync, layer, unused, settings.get("weight"))
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    torch.testing.assert_close(results[0]["weights"], weights, rtol=1e-10, atol=1e-12)
    for rank in (0, 1):
        for got, expected in zip(results[rank]["buffers"], buffers, strict=True):
            for name, value in got.items():
                torch.testing.assert_close(value, expected[rank][name], rtol=1e-10, atol=1e-12)
    assert results[0]["no_gradient"] == (["never.weight", "never.bias"] if unused else [])
    size = sum(p.numel() for p in ddp_cases.make_model(layer, unused).parameters())
    # Where SAM sums gradients itself, the five parameters that nobody uses are left out of the last reduction.
    left_out = 5 if unused and (way in ("list", "rest") or "weight" in settings) else 0
    assert sum(results[0]["reductions"]) == ddp_cases.STEPS * (num_reductions * size - left_out)


def test_a_static_graph_works_with_a_shared_perturbation(two_processes):
    settings = ("closure", {"sync_perturbation": True}, {"static_graph": True}, None, False)
    results = two_processes.run(ddp_cases.train, *settings)
    torch.testing.assert_close(results[0]["weights"], reference("closure", True, None, False, None)[0])


def test_it_warns_once_where_it_cannot_keep_the_first_pass_local(two_processes):
    for without, wrong, right in two_processes.run(ddp_cases.warn_without_the_wrapper):
        assert len(without) == 1
        assert "is not given" in without[0]
        assert len(wrong) == 1
        assert "Net" in wrong[0]
        assert right == []


@pytest.mark.parametrize("sync", [False, True])
def test_random_directions_differ_between_workers_unless_shared(two_processes, sync):
    first, second = two_processes.run(ddp_cases.random_directions, sync)
    assert torch.equal(first, second) == sync


def test_mixing_in_the_two_pass_form_needs_a_shared_perturbation(two_processes):
    for message in two_processes.run(ddp_cases.mixed_two_pass_form):
        assert "Pass sync_perturbation=True" in message


def test_a_rest_that_drops_the_gradients_is_refused(two_processes):
    for message in two_processes.run(ddp_cases.rest_that_drops_gradients):
        assert "must zero them with opt.zero_grad()" in message


def test_a_trainers_search_for_rho_skips_a_step_that_overflows_on_one_worker_on_all(two_processes):
    model = ddp_cases.make_model()
    params = dict(model.named_parameters())
    batches = [ddp_cases.whole_batch(rank, 0) for rank in range(2)]
    losses = [ddp_cases.loss_of(model, batch).item() for batch in batches]
    norms = [torch.cat([g.reshape(-1) for g in gradient(model, params, {}, batch, False)]).norm() for batch in batches]
    rho = pytest.approx(0.1 * sum(losses) / sum(norms).item())
    for found in two_processes.run(ddp_cases.search_with_an_overflow):
        assert found == [(0.0, 8), (rho, 7), (rho, 6)]
