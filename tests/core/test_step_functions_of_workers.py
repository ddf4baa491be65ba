"""Functions for the direction and the combination under DDP and FSDP2, with two gloo processes."""

import pytest
import torch

import ddp_cases
import fsdp_cases
from references import eq2, flat, unflat

FUNCTIONS = {"direction": ddp_cases.roots, "combine": ddp_cases.surrogate_gap}


def reference(way, sync):
    """Mean over workers of what each makes of its gradients; or what all make of the mean gradients."""
    model = ddp_cases.make_model()
    parameters = list(model.parameters())

    def gradient(w, data):
        named = dict(zip(dict(model.named_parameters()), unflat(w.requires_grad_(), parameters), strict=True))
        loss = ((torch.func.functional_call(model, named, (data[0],)) - data[1]) ** 2).mean()
        return torch.autograd.grad(loss, w)[0]

    def mean_gradient(w, batches):
        return torch.stack([gradient(w.clone(), data) for data in batches]).mean(dim=0)

    def combined(w, batches):
        g = mean_gradient(w, batches)
        at_eps = mean_gradient(w + eq2(*ddp_cases.roots([g]), 0.3, 2.0), batches)
        return ddp_cases.surrogate_gap([g], [at_eps])[0], g

    w, sizes = flat(parameters), ddp_cases.SIZES
    for step in range(ddp_cases.STEPS):
        if way in ("list", "rest"):
            pieces = list(zip(*(ddp_cases.micro_batches(rank, step) for rank in range(2)), strict=True))
            shares = [size / sum(sizes) for size in sizes]
        else:
            pieces, shares = [[ddp_cases.whole_batch(rank, step) for rank in range(2)]], [1.0]
        total = torch.zeros_like(w)
        for index, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
            if way == "rest" and index == 1:
                total += share * mean_gradient(w, piece)
                continue
            found = [combined(w, piece)] if sync else [combined(w, [data]) for data in piece]
            for result, g in found:
                # With a rest the correction keeps its strength.
                total += (share * g + result - g if way == "rest" else share * result) / len(found)
        w = w - 0.1 * total
    return w


@pytest.mark.parametrize("bucket_views", [False, True])
@pytest.mark.parametrize(
    ("way", "sync"), [("closure", False), ("closure", True), ("list", False), ("list", True), ("rest", False),
                      ("perturbed", True)]
)  # fmt: skip
def test_ddp_gives_functions_local_gradients_or_reduced_ones(two_processes, way, sync, bucket_views):
    settings = {**FUNCTIONS, "sync_perturbation": sync}
    ddp_settings = {"gradient_as_bucket_view": bucket_views}
    for got in two_processes.run(ddp_cases.train, way, settings, ddp_settings, None, False):
        torch.testing.assert_close(got["weights"], reference(way, sync), rtol=1e-9, atol=1e-11)
        if way in ("closure", "list") and not sync:
            assert len(got["reductions"]) == ddp_cases.STEPS, "one per step"


def test_two_passes_under_ddp_must_share_what_is_combined(two_processes):
    settings = {**FUNCTIONS, "sync_perturbation": False}
    with pytest.raises(RuntimeError, match=r"perturbed\(\) with combine under DistributedDataParallel"):
        two_processes.run(ddp_cases.train, "perturbed", settings, {}, None, False)


@pytest.mark.parametrize("way", ["closure", "perturbed"])
def test_elementwise_functions_of_shards_are_those_of_a_single_process(two_processes, way):
    settings = {"direction": ddp_cases.ElementwiseRoots(), "combine": ddp_cases.ElementwiseMinimum()}
    expected = fsdp_cases.single_process({"rho": 0.3, **settings})
    for got in two_processes.run(fsdp_cases.train, {"rho": 0.3, **settings}, way):
        for value, reference_value in zip(got, expected, strict=True):
            torch.testing.assert_close(value, reference_value, rtol=1e-10, atol=1e-12, equal_nan=True)


def test_shards_need_elementwise_functions_without_state_in_a_distributed_checkpoint(two_processes):
    for direction, combine, checkpoint in two_processes.run(fsdp_cases.errors_with_functions):
        assert direction.startswith("direction is a function, but parameters are sharded")
        assert "combine" in combine
        assert "elementwise = True" in combine
        assert "cannot hold the state of direction" in checkpoint
