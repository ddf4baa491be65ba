"""Cheap SAM with two gloo workers, against one process that re-derives both in float64."""

import pytest
import torch

import ddp_cases


def gradient(model, params, buffers, batch):
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    out = torch.func.functional_call(model, (leaves, {k: b.clone() for k, b in buffers.items()}), (batch[0],))
    grads = torch.autograd.grad(((out - batch[1]) ** 2).mean(), list(leaves.values()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]


def corrected(model, params, buffers, batch, weight):
    """g + c (g(w + eps) - g), eps = 0.3 g / |g|."""
    g = gradient(model, params, buffers, batch)
    norm = torch.cat([t.reshape(-1) for t in g]).norm()
    moved = {name: p + 0.3 * t / norm for (name, p), t in zip(params.items(), g, strict=True)}
    return [a + weight * (b - a) for a, b in zip(g, gradient(model, moved, buffers, batch), strict=True)]


def reference(way, batch_norm, weight):
    model = ddp_cases.make_model(batch_norm)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for step in range(ddp_cases.STEPS):
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
        total = [torch.zeros_like(p) for p in params.values()]
        for rank in range(2):
            if way == "rest":
                share = ddp_cases.SIZES[0] / sum(ddp_cases.SIZES)
                part, rest = ddp_cases.micro_batches(rank, step)
                c = 1 / share if weight is None else weight
                of_part, of_rest = corrected(model, params, buffers, part, c), gradient(model, params, buffers, rest)
                mine = [share * a + (1 - share) * b for a, b in zip(of_part, of_rest, strict=True)]
            else:
                mine = corrected(model, params, buffers, ddp_cases.whole_batch(rank, step), weight)
            total = [t + g / 2 for t, g in zip(total, mine, strict=True)]
        with torch.no_grad():
            for p, g in zip(model.parameters(), total, strict=True):
                p -= 0.1 * g
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("ddp_settings", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("way", "settings"),
    [("rest", {}), ("rest", {"weight": 1.0}), ("closure", {"weight": 2.5})],
)
def test_two_workers_take_the_mean_of_their_corrected_gradients(two_processes, way, settings, batch_norm, ddp_settings):
    results = two_processes.run(ddp_cases.train, way, settings, ddp_settings, batch_norm, False)
    expected = reference(way, batch_norm, settings.get("weight"))
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    torch.testing.assert_close(results[0]["weights"], expected, rtol=1e-10, atol=1e-12)
    size = sum(p.numel() for p in ddp_cases.make_model(batch_norm).parameters())
    assert sum(results[0]["reductions"]) == ddp_cases.STEPS * size, "gradients are reduced once a step"


def test_statistics_come_from_the_rest(two_processes):
    results = two_processes.run(ddp_cases.train, "rest", {}, {}, True, False)
    model = ddp_cases.make_model(True)
    with torch.no_grad():
        model(ddp_cases.micro_batches(0, 0)[1][0])
    for name, value in model.named_buffers():
        torch.testing.assert_close(results[0]["buffers"][0][name], value)


def test_mixing_in_the_two_pass_form_needs_a_shared_perturbation(two_processes):
    for message in two_processes.run(ddp_cases.mixed_two_pass_form):
        assert "Pass sync_perturbation=True" in message


def test_a_rest_that_drops_the_gradients_is_refused(two_processes):
    for message in two_processes.run(ddp_cases.rest_that_drops_gradients):
        assert "must zero them with opt.zero_grad()" in message
