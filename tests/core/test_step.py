"""One step, in each of the three ways, against the paper's formulas."""

import math

import pytest
import torch
from torch import nn

import references
from flatmin import SAM
from references import closure_of

A = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 3.0]], dtype=torch.float64)


class Quadratic(nn.Module):
    """L(w) = w.A w / 2 + sum(w^4) with w in two tensors, so that a norm per tensor would fail."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([[0.5]], dtype=torch.float64))

    def forward(self):
        return quadratic(torch.cat([self.a, self.b.view(-1)]))


def quadratic(w):
    return w @ A @ w / 2 + (w**4).sum()


def two_passes(opt, loss_of):
    loss_of().backward()
    with opt.perturbed():
        opt.zero_grad()
        loss_of().backward()
    opt.step()


def weights(model):
    return references.flat(model.parameters())


@pytest.mark.parametrize("way", ["closure", "perturbed"])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("rho", [0.0, 0.05, 1.0])
def test_a_step_descends_along_the_gradient_at_the_perturbed_weights(way, p, rho):
    model = Quadratic()
    w = weights(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=rho, p=p)
    if way == "closure":
        assert opt.step(closure_of(opt, model)).item() == pytest.approx(quadratic(w).item())
    else:
        two_passes(opt, model)
    g, _ = references.sam_gradient(quadratic, w, rho, p)
    torch.testing.assert_close(weights(model), w - 0.1 * g, rtol=1e-12, atol=0)


def test_adaptive_true_is_eta_one_hundredth_and_0_is_not_false():
    base = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert SAM(base, adaptive=True).eta == 0.01
    assert SAM(base, adaptive=0.0).eta == 0.0
    assert SAM(base, adaptive=False).eta is None


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("eta", [None, 0.0, 0.1])
@pytest.mark.parametrize("radii", [(0.3, 0.3), (0.3, 0.1), (0.3, 0.0)])
def test_groups_have_their_own_radius_and_one_joint_norm_and_adaptive_is_asam(p, eta, radii):
    model = Quadratic()
    w = weights(model)
    groups = [{"params": [model.a], "sam_rho": radii[0]}, {"params": [model.b]}]
    opt = SAM(torch.optim.SGD(groups, lr=0.1), rho=radii[1], p=p, adaptive=False if eta is None else eta)
    opt.step(closure_of(opt, model))
    scale = torch.tensor([radii[0], radii[0], radii[1]], dtype=torch.float64)
    if eta is not None:
        scale = scale * (w.abs() + eta)
    g, eps = references.sam_gradient(quadratic, w, None, p, scale=scale)
    torch.testing.assert_close(weights(model), w - 0.1 * g, rtol=1e-12, atol=0)
    torch.testing.assert_close(opt.metrics.perturbation_norm, eps.norm(p=p))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("adaptive", [False, 0.1])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_several_ascent_steps_are_projected_gradient_ascent(p, adaptive, steps):
    model = Quadratic()
    w = weights(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, p=p, adaptive=adaptive, ascent_steps=steps)
    opt.step(closure_of(opt, model))
    scale = 0.3 * (w.abs() + 0.1) if adaptive else None
    g, eps = references.sam_gradient(quadratic, w, 0.3, p, scale=scale, steps=steps)
    torch.testing.assert_close(weights(model), w - 0.1 * g, rtol=1e-11, atol=0)
    torch.testing.assert_close(opt.metrics.perturbation_norm, eps.norm(p=p))


def test_metrics_report_both_losses_their_difference_and_both_norms():
    model = Quadratic()
    w = weights(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.2)
    assert all(math.isnan(getattr(opt.metrics, name)) for name in ("loss", "sharpness", "grad_norm"))
    opt.step(closure_of(opt, model))
    _, eps = references.sam_gradient(quadratic, w, 0.2)
    m = opt.metrics
    assert m.loss.item() == pytest.approx(quadratic(w).item())
    assert m.perturbed_loss.item() == pytest.approx(quadratic(w + eps).item())
    assert m.sharpness.item() == pytest.approx((quadratic(w + eps) - quadratic(w)).item())
    assert m.relative_sharpness.item() == pytest.approx((quadratic(w + eps) / quadratic(w)).item() - 1)
    assert m.grad_norm.item() == pytest.approx(references.gradient(quadratic, w).norm().item())
    assert m.perturbation_norm.item() == pytest.approx(0.2)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_random_direction_has_norm_rho_and_no_first_pass(p):
    model = Quadratic()
    w = weights(model)
    generator = torch.Generator().manual_seed(3)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.2, p=p, direction="random", generator=generator)
    seen = []

    def loss():
        seen.append(weights(model))
        return model()

    returned = opt.step(closure_of(opt, loss))
    assert len(seen) == 1
    assert (seen[0] - w).norm(p=p).item() == pytest.approx(0.2)
    torch.testing.assert_close(weights(model), w - 0.1 * references.gradient(quadratic, seen[0]))
    assert returned.item() == opt.metrics.perturbed_loss.item() == pytest.approx(quadratic(seen[0]).item())
    assert math.isnan(opt.metrics.loss)


def test_a_random_direction_can_be_seeded_and_differs_from_step_to_step():
    def directions(seed):
        model = Quadratic()
        generator = torch.Generator().manual_seed(seed)
        opt = SAM(torch.optim.SGD(model.parameters(), lr=0.0), rho=0.2, direction="random", generator=generator)
        seen = []
        for _ in range(2):
            opt.step(closure_of(opt, lambda: seen.append(weights(model)) or model()))
        return seen

    first, again, other = directions(1), directions(1), directions(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_another_closure_may_give_the_direction():
    model = Quadratic()
    w = weights(model)
    calls = []
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)

    def part(v):
        return (v**3).sum() + v.sum()

    def ascent_loss():
        calls.append("ascent")
        return part(torch.cat([model.a, model.b.view(-1)]))

    def main_loss():
        calls.append("main")
        return model()

    returned = opt.step(closure_of(opt, main_loss), ascent=closure_of(opt, ascent_loss))
    eps = references.eq2(references.gradient(part, w), 0.3, 2.0)
    assert calls == ["ascent", "main"]
    torch.testing.assert_close(weights(model), w - 0.1 * references.gradient(quadratic, w + eps))
    assert returned.item() == pytest.approx(quadratic(w + eps).item())
    assert opt.metrics.loss.item() == pytest.approx(part(w).item())


def test_a_maximized_loss_has_its_worst_neighbor_below():
    model, mirrored = Quadratic(), Quadratic()
    down = SAM(torch.optim.SGD(model.parameters(), lr=0.01), rho=0.3)
    up = SAM(torch.optim.SGD(mirrored.parameters(), lr=0.01, maximize=True), rho=0.3)
    down.step(closure_of(down, model))
    up.step(closure_of(up, lambda: -mirrored()))
    torch.testing.assert_close(weights(model), weights(mirrored))


def test_a_closure_that_does_not_zero_the_gradients_between_passes_is_still_right():
    model = Quadratic()
    w = weights(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)

    def closure():
        loss = model()
        loss.backward()
        return loss

    opt.zero_grad()
    opt.step(closure)
    torch.testing.assert_close(weights(model), w - 0.1 * references.sam_gradient(quadratic, w, 0.3)[0])


def test_many_tensors_of_many_sizes_still_have_one_joint_norm():
    """More elements than one chunk holds, tensors larger than a chunk, and empty ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(70_000,), (3,), (0,), (300, 300), (2, 3, 4), (70_000,), (1,)]
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    params[3].data = params[3].data.t()  # not contiguous
    w = references.flat(params)
    opt = SAM(torch.optim.SGD(params, lr=0.1), rho=0.3)
    opt.step(closure_of(opt, lambda: sum((p**4).sum() for p in params)))
    g, _ = references.sam_gradient(lambda v: (v**4).sum(), w, 0.3)
    torch.testing.assert_close(references.flat(params), w - 0.1 * g, rtol=1e-10, atol=1e-12)
