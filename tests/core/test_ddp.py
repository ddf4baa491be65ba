"""DistributedDataParallel with two gloo processes, against a single process that re-derives both."""

import pytest
import torch

import ddp_cases
from flatmin import sam_gradient


def reference(way, sync, batch_norm, unused):
    """Train in one process: the mean over workers (and micro-batches) of SAM gradients, from the paper's definition."""
    model = ddp_cases.make_model(batch_norm, unused)
    names = [name for name, _ in model.named_parameters()]
    buffers = {name: b.clone() for name, b in model.named_buffers()}  # rank 0's, which DDP broadcasts
    history = []
    for step in range(ddp_cases.STEPS):
        params = {name: p.detach() for name, p in model.named_parameters()}
        parts = []  # of each worker: (weight, batch)
        for rank in range(2):
            if way == "list":
                sizes = ddp_cases.SIZES
                batches = ddp_cases.micro_batches(rank, step)
                parts.append([(n / sum(sizes), b) for n, b in zip(sizes, batches, strict=True)])
            else:
                parts.append([(1.0, ddp_cases.whole_batch(rank, step))])

        def loss_at(p, rank, batch, buffers_now):
            out = torch.func.functional_call(model, (p, buffers_now), (batch[0], unused and rank == 0))
            return ((out - batch[1]) ** 2).mean()

        local_buffers = [{k: v.clone() for k, v in buffers.items()} for _ in range(2)]
        total = {name: torch.zeros_like(t) for name, t in params.items()}
        for index in range(len(parts[0])):
            if sync:  # the gradient that gives eps is the mean over the workers
                mean = [0.5, 0.5]

                def joint_loss(p):
                    return sum(
                        mean[r] * loss_at(p, r, parts[r][index][1], {k: v.clone() for k, v in local_buffers[r].items()})
                        for r in range(2)
                    )

                eps = sam_gradient(joint_loss, params, rho=0.3).perturbation
            for rank in range(2):
                weight, batch = parts[rank][index]

                def loss(p):
                    return loss_at(p, rank, batch, {k: v.clone() for k, v in local_buffers[rank].items()})

                if sync:
                    moved = {k: (v + eps[k]).requires_grad_() for k, v in params.items()}
                    found = torch.autograd.grad(loss(moved), list(moved.values()), allow_unused=True)
                    pairs = zip(moved.items(), found, strict=True)
                    grads = {k: torch.zeros_like(v) if g is None else g for (k, v), g in pairs}
                else:
                    grads = sam_gradient(loss, params, rho=0.3).grads
                for name in names:
                    total[name] += 0.5 * weight * grads[name]
                loss_at(params, rank, batch, local_buffers[rank])  # the statistics of one pass at w
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * total[name]
        history.append(local_buffers)
        buffers = local_buffers[0]
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), history


@pytest.mark.parametrize("way", ["closure", "list", "perturbed"])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("ddp_settings", "batch_norm", "unused"),
    [
        ({}, False, False),
        ({"gradient_as_bucket_view": True}, False, False),
        ({}, True, False),
        ({"find_unused_parameters": True}, False, True),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, True, True),
    ],
)
def test_eps_is_per_worker_or_shared_as_one_process_derives_it(
    two_processes, way, sync, ddp_settings, batch_norm, unused
):
    results = two_processes.run(ddp_cases.train, way, {"sync_perturbation": sync}, ddp_settings, batch_norm, unused)
    weights, buffers = reference(way, sync, batch_norm, unused)
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    torch.testing.assert_close(results[0]["weights"], weights, rtol=1e-10, atol=1e-12)
    for rank in range(2):
        for got, expected in zip(results[rank]["buffers"], buffers, strict=True):
            for name, value in got.items():
                torch.testing.assert_close(value, expected[rank][name], rtol=1e-10, atol=1e-12)
    assert results[0]["no_gradient"] == (["never.weight", "never.bias"] if unused else [])

    size = sum(p.numel() for p in ddp_cases.make_model(batch_norm, unused).parameters())
    passes = {"closure": 2, "list": 3, "perturbed": 2}[way] if sync else 1
    if not (unused and way == "list"):  # there, the parameters nobody uses are left out
        assert sum(results[0]["reductions"]) == ddp_cases.STEPS * passes * size, "gradients are reduced once a step"


def test_a_static_graph_works_with_a_shared_perturbation(two_processes):
    results = two_processes.run(
        ddp_cases.train, "closure", {"sync_perturbation": True}, {"static_graph": True}, False, False
    )
    torch.testing.assert_close(results[0]["weights"], reference("closure", True, False, False)[0])


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
