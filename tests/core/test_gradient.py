"""The pure function, and its second-order term, against autograd and finite differences."""

import math

import pytest
import torch
from torch import nn

import references
from flatmin import sam_gradient

torch.manual_seed(0)
X = torch.randn(12, 3, dtype=torch.float64)
Y = torch.randn(12, dtype=torch.float64)
SHAPES = [(4, 3), (4,), (4,)]


def weights(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def network_loss(params):
    first, bias, second = params
    return ((torch.tanh(X @ first.T + bias) @ second - Y) ** 2).mean()


def flat_loss(v):
    return network_loss(references.unflat(v, weights()))


@pytest.mark.parametrize(
    ("p", "steps"), [*((p, 1) for p in (1.0, 1.5, 2.0, 5.0, math.inf)), (1.0, 3), (2.0, 3), (math.inf, 3)]
)
@pytest.mark.parametrize("adaptive", [False, 0.05])
def test_it_is_equation_3_at_the_steps_of_equation_2(p, steps, adaptive):
    w = references.flat(weights())
    got = sam_gradient(network_loss, weights(), rho=0.2, p=p, adaptive=adaptive, ascent_steps=steps)
    scale = 0.2 * (w.abs() + 0.05) if adaptive else None
    g, eps = references.sam_gradient(flat_loss, w, 0.2, p, scale=scale, steps=steps)
    close = {"rtol": 1e-11, "atol": 1e-14} if steps == 1 else {"rtol": 1e-10, "atol": 1e-13}
    torch.testing.assert_close(references.flat(got.grads), g, **close)
    torch.testing.assert_close(references.flat(got.perturbation), eps, **close)
    torch.testing.assert_close(got.loss, flat_loss(w))
    torch.testing.assert_close(got.perturbed_loss, flat_loss(w + eps))


@pytest.mark.parametrize(("p", "rho"), [(2.0, 0.2), (2.0, 1.0), (math.inf, 0.05)])
def test_the_second_order_gradient_is_autograd_through_the_whole_expression(p, rho):
    v = references.flat(weights()).requires_grad_()
    g = torch.autograd.grad(flat_loss(v), v, create_graph=True)[0]
    eps = rho * (g / g.norm() if p == 2 else g.sign())
    exact = torch.autograd.grad(flat_loss(v + eps), v)[0]
    got = sam_gradient(network_loss, weights(), rho=rho, p=p, second_order=True)
    torch.testing.assert_close(references.flat(got.grads), exact, rtol=1e-11, atol=1e-14)
    if p == 2:
        first_order = sam_gradient(network_loss, weights(), rho=rho, p=p)
        assert not torch.allclose(references.flat(first_order.grads), exact, rtol=1e-3)


def test_a_quadratic_has_the_closed_form_second_order_gradient():
    """For L = w.A w / 2: (I + rho/|g| A (I - gg/|g|^2)) A (w + rho g/|g|), with g = A w."""
    a = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    w = torch.tensor([1.0, -3.0], dtype=torch.float64)
    g = a @ w
    unit = g / g.norm()
    jacobian = torch.eye(2).double() + 0.4 / g.norm() * a @ (torch.eye(2).double() - torch.outer(unit, unit))
    expected = jacobian @ a @ (w + 0.4 * unit)
    got = sam_gradient(lambda t: t["w"] @ a @ t["w"] / 2, {"w": w}, rho=0.4, second_order=True)
    torch.testing.assert_close(got.grads["w"], expected, rtol=1e-12, atol=0)
    assert set(got.perturbation) == {"w"}


def test_nothing_is_changed_and_nothing_is_attached():
    params = [nn.Parameter(t) for t in weights()]
    got = sam_gradient(network_loss, params, rho=0.2, second_order=True)
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(params, weights(), strict=True))
    assert not any(t.requires_grad for t in [*got.grads, *got.perturbation, got.loss, got.perturbed_loss])


def test_a_parameter_the_loss_does_not_use_has_gradient_and_perturbation_zero():
    got = sam_gradient(lambda t: t[0].square().sum(), [torch.ones(2), torch.ones(3)], rho=0.2, second_order=True)
    assert got.grads[1].tolist() == got.perturbation[1].tolist() == [0.0] * 3


def test_random_layers_draw_the_same_noise_in_all_passes():
    def loss(params):
        noise = nn.functional.dropout(torch.ones(1000), 0.5)
        seen.append(noise)
        return (params[0] * noise).sum()

    seen = []
    torch.manual_seed(5)
    sam_gradient(loss, [torch.ones(1000)], rho=0.2, second_order=True)
    assert torch.equal(seen[0], seen[1])
    after = torch.rand(1)
    torch.manual_seed(5)
    loss([torch.ones(1000)])
    assert torch.equal(after, torch.rand(1))


def test_a_random_direction_comes_from_the_generator():
    def direction(seed):
        generator = torch.Generator().manual_seed(seed)
        return references.flat(
            sam_gradient(network_loss, weights(), rho=0.2, direction="random", generator=generator).perturbation
        )

    assert torch.equal(direction(1), direction(1))
    assert not torch.equal(direction(1), direction(2))
    assert direction(1).norm().item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"second_order": True, "adaptive": True}, "adaptive"),
        ({"second_order": True, "ascent_steps": 2}, "supports only ascent_steps=1, got 2"),
        ({"second_order": True, "p": 3.0}, "p=3.0"),
        ({"ascent_steps": 2, "p": 3.0}, "p=3.0"),
        ({"ascent_steps": 2, "direction": "random"}, "random"),
        ({"rho": -1.0}, "rho"),
        ({"p": 0.5}, "p must"),
        ({"direction": "sideways"}, "sideways"),
        ({"params": []}, "empty"),
    ],
)
def test_unsupported_combinations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sam_gradient(network_loss, **{"params": weights()} | settings)
