"""The extra memory of a step, and what rounding leaves of a perturbation."""

import pytest
import torch
from torch import nn

from flatmin import SAM, effective_perturbation


def test_the_extra_memory_is_one_copy_of_the_parameters_and_one_largest_tensor():
    """Measured by what the process really holds: bytes of all buffers that SAM keeps or makes."""
    sizes = [(600, 500), (1000,), (300, 300), (200, 1000)]
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    total, largest = (f(p.numel() * 4 for p in params) for f in (sum, max))
    opt = SAM(torch.optim.SGD(params, lr=0.1), rho=0.1)
    for p in params:
        p.grad = torch.randn_like(p)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=activities) as profiler, opt.perturbed():
        during = _held_by(opt)
    now, peak = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    small = 64 * 1024  # scalars and rows
    assert during <= total + small, "while the passes run there is the copy and nothing else"
    assert total <= peak <= total + largest + small


def _held_by(opt):
    perturber = opt._state.perturber
    storages = {b.saved.untyped_storage() for b in perturber._blocks}
    storages |= {s.untyped_storage() for s in perturber._scratch}
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_effective_perturbation_is_what_the_forward_pass_really_sees(dtype):
    torch.manual_seed(0)
    model = nn.Linear(400, 300).to(dtype)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    model(torch.randn(8, 400, dtype=dtype)).square().mean().backward()
    compute = torch.bfloat16
    report = effective_perturbation(opt, compute_dtype=compute)
    before = [p.detach().clone() for p in model.parameters()]
    grads = [p.grad.double() for p in model.parameters()]
    joint = torch.cat([g.flatten() for g in grads])
    eps = torch.cat([(0.05 * g / joint.norm()).flatten() for g in grads])
    with opt.perturbed():
        seen = torch.cat(
            [
                (p.detach().to(compute).double() - b.to(compute).double()).flatten()
                if p.dim() > 1
                else (p.detach().double() - b.double())
                for p, b in zip(model.parameters(), before, strict=True)
            ]
        )
    assert report.norm == pytest.approx(0.05, rel=1e-3)
    assert report.effective_norm == pytest.approx(seen.norm().item(), rel=1e-9)
    assert report.cosine == pytest.approx(torch.nn.functional.cosine_similarity(seen, eps, dim=0).item(), rel=1e-3)
    assert report.projection == pytest.approx((seen @ eps / (eps @ eps)).item(), rel=1e-3)
    assert report.cosine < 0.95, "a small share of eps is rounded away or up"
    assert 0 < report.unmoved < 1


def test_without_rounding_the_effective_perturbation_is_the_asked_one():
    w = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.05)
    (w**2).sum().backward()
    report = effective_perturbation(opt)
    assert (report.norm, report.effective_norm) == pytest.approx((0.05, 0.05))
    assert (report.cosine, report.projection, report.unmoved) == pytest.approx((1.0, 1.0, 0.0))


def test_the_effective_perturbation_needs_gradients():
    opt = SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(ValueError, match="no gradients"):
        effective_perturbation(opt)
