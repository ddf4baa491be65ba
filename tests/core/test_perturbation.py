"""Equation 2 for every p, against its formula and what it must maximize; its memory, and what rounding leaves of it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import references
from flatmin import SAM, ascent_step, effective_perturbation, random_step
from flatmin.core import perturbation

P = [1.0, 1.2, 1.5, 2.0, 3.0, 10.0, math.inf]


def tensors(seed=0, dtype=torch.float64):
    """Two tensors and a scalar, so that a norm per tensor would fail."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((3, 4), (5,), ())]


@pytest.mark.parametrize("p", P)
def test_the_step_is_equation_2_with_a_joint_norm(p):
    g = tensors()
    torch.testing.assert_close(
        references.flat(ascent_step(g, rho=0.3, p=p)), references.eq2(references.flat(g), 0.3, p), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("p", P)
def test_the_step_has_p_norm_rho_and_reaches_the_dual_norm(p):
    """The maximum of <eps, g> over the ball is rho ||g||_q (Hoelder's inequality is an equality)."""
    g = references.flat(tensors(1))
    eps = references.flat(ascent_step(tensors(1), rho=0.3, p=p))
    torch.testing.assert_close(eps.norm(p=p), torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(eps @ g, 0.3 * g.norm(p=references.dual_exponent(p)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), st.sampled_from(P), st.integers(0, 100))
def test_no_other_point_of_the_ball_has_a_larger_linearized_loss(values, p, seed):
    g = torch.tensor(values, dtype=torch.float64)
    eps = ascent_step([g], rho=1.0, p=p)[0]
    other = torch.randn(len(g), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    other = other / other.norm(p=p)
    assert other @ g <= eps @ g + 1e-9 * (1 + g.abs().sum())


@pytest.mark.parametrize(
    ("p", "g", "expected"),
    [
        (math.inf, [3.0, -0.1, 0.0], [0.5, -0.5, 0.0]),  # the sign
        (1.0, [3.0, -0.1, -4.0], [0.0, 0.0, -0.5]),  # all on the largest coordinate
        (1.0, [-4.0, 1.0, 4.0], [-0.25, 0.0, 0.25]),  # shared among equally large ones
    ],
)
def test_steps_by_hand(p, g, expected):
    assert references.flat(ascent_step(list(torch.tensor(g).split([2, 1])), rho=0.5, p=p)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-36, 1e-30, 1.0, 1e25, 1e38])
@pytest.mark.parametrize("p", P)
def test_neither_overflow_nor_underflow_changes_the_norm(p, size, dtype):
    unit = tensors()
    g = [(t * size).to(dtype) for t in unit]
    eps = references.flat(ascent_step(g, rho=0.05, p=p))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert eps.norm(p=p).item() == pytest.approx(0.05, rel=tolerance)


def test_a_subnormal_gradient_gives_a_finite_step_no_longer_than_rho():
    eps = references.flat(ascent_step([torch.full((3,), 1e-42)], rho=0.05))
    assert 0 < eps.norm().item() <= 0.05


def test_a_half_precision_gradient_is_not_lost_in_its_reciprocal_norm():
    g = [torch.full((4,), 1e-7, dtype=torch.float16)]
    assert references.flat(ascent_step(g, rho=0.05)).norm().item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("bad", [0.0, math.inf, -math.inf, math.nan])
def test_a_zero_or_non_finite_gradient_gives_no_step(p, bad):
    g = [torch.zeros(3), torch.tensor([bad, 0.0])]
    if bad != 0:
        g[0] += 1.0
    assert references.flat(ascent_step(g, rho=0.3, p=p)).tolist() == [0.0] * 5


@pytest.mark.parametrize("p", P)
def test_scales_follow_the_one_formula(p):
    g, w = tensors(2), tensors(3)
    scales = [0.5 * (t.abs() + 0.01) for t in w]
    expected = references.scaled_eq2(references.flat(g), references.flat(scales), p)
    torch.testing.assert_close(references.flat(ascent_step(g, p=p, scales=scales)), expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("p", P)
def test_a_random_step_has_the_same_norm_and_is_gaussian_noise(p):
    like = tensors()
    eps = references.flat(random_step(like, rho=0.3, p=p, generator=torch.Generator().manual_seed(5)))
    assert eps.norm(p=p).item() == pytest.approx(0.3)
    generator = torch.Generator().manual_seed(5)
    noise = references.flat([torch.empty_like(t).normal_(generator=generator) for t in like])
    torch.testing.assert_close(eps, 0.3 * noise / noise.norm(p=p))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_the_projection_is_the_nearest_point_of_the_ball(p, size):
    x = [t * size for t in tensors(4)] + [torch.randn(500, generator=torch.Generator().manual_seed(1)).double() * size]
    expected = references.projection(references.flat(x), p)
    perturbation.project_(x, p)
    torch.testing.assert_close(references.flat(x), expected, rtol=1e-12, atol=1e-14)


def test_a_complex_gradient_is_a_pair_of_real_ones():
    g = torch.tensor([3.0 + 4.0j])
    torch.testing.assert_close(ascent_step([g], rho=0.5)[0], torch.tensor([0.3 + 0.4j]))
    torch.testing.assert_close(ascent_step([g], rho=0.5, p=math.inf)[0], torch.tensor([0.5 + 0.5j]))


def test_rows_merge_whatever_their_sizes_and_empty_parts_count_nothing():
    u = torch.tensor([1e-30, 2e-30, 3e25, 4e25, 0.0])
    for q in P:
        parts = [perturbation.row_(part.clone(), q) for part in (u[:2], u[2:], u[:0])]
        whole = perturbation.join(torch.stack(parts), q)
        assert perturbation.norm(whole, q).item() == pytest.approx(u.double().norm(p=q).item())


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
