"""What a step costs beside its passes: no device sync, one copy of the parameters, few collectives."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatmin import SAM, effective_perturbation

SYNCS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "unique", "allclose", "masked_select"}


class CountSyncs(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in SYNCS and not self.paused:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"p": 1.0},
        {"p": 3.0},
        {"p": math.inf},
        {"adaptive": True},
        {"ascent_steps": 3},
        {"ascent_steps": 2, "p": 1.0},
        {"direction": "random"},
    ],
)
@pytest.mark.parametrize("way", ["closure", "list", "perturbed"])
def test_nothing_waits_for_the_device_outside_of_the_base_step(settings, way):
    """Reading a number from a tensor is what makes a host wait for a device; on the CPU it can be counted."""
    if way == "perturbed" and settings.get("ascent_steps", 1) > 1:
        way = "closure"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(16, 4)
    opt = SAM(torch.optim.AdamW(model.parameters(), lr=0.1), model=model, **settings)
    counter = CountSyncs()

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def pause(*_):
        counter.paused = True

    def resume(*_):
        counter.paused = False

    opt.base.register_step_pre_hook(pause)
    opt.base.register_step_post_hook(resume)
    with counter:
        for _ in range(2):
            if way == "perturbed":
                closure()
                with opt.perturbed():
                    closure()
                opt.step()
            else:
                opt.step(closure if way == "closure" else [closure, closure])
    assert counter.found == []
    with counter:
        opt.metrics.loss.item()
    assert counter.found == ["_local_scalar_dense"], "the counter counts"


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


def test_a_effective_perturbation_needs_gradients():
    opt = SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(ValueError, match="no gradients"):
        effective_perturbation(opt)
