import math

import pytest
import torch

from flatmin.measures import sam_update_cosine
from measures.cases import Quadratic, flat_loss, mean_output, quadratic, tanh_network, whole


def reference(loss, w, rho):
    """Differentiate L(w + rho g(w) / |g(w)|) with and without the dependence of g on w."""
    w = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(w), w, create_graph=True)
    eps = rho * g / g.norm()
    (second,) = torch.autograd.grad(loss(w + eps), w, retain_graph=True)
    (first,) = torch.autograd.grad(loss(w + eps.detach()), w)
    return float(first @ second / (first.norm() * second.norm()))


@pytest.mark.parametrize("rho", [0.01, 0.3, 2.0])
def test_the_cosine_on_a_network_is_that_of_the_exact_derivative(rho):
    model, loss_fn, data = tanh_network()
    loss, w = flat_loss(model, loss_fn, data)
    found = sam_update_cosine(model, loss_fn, whole(data)[0], rho=rho)
    assert found == pytest.approx(reference(loss, w, rho), rel=1e-10)
    assert (found < 1 - 1e-6) == (rho > 0.1)


def test_the_cosine_on_a_quadratic_by_hand():
    """v = A (w + eps) + b, and the exact gradient is v + A u with u = rho / |g| (v - g_hat (g_hat . v))."""
    model, data, A, b, w = quadratic()
    A, b = A.mean(0), b.mean(0)
    g = A @ w + b
    unit = g / g.norm()
    v = A @ (w + 0.5 * unit) + b
    exact = v + A @ (0.5 / g.norm() * (v - unit * (unit @ v)))
    expected = float(v @ exact / (v.norm() * exact.norm()))
    assert sam_update_cosine(model, mean_output, whole(data)[0], rho=0.5) == pytest.approx(expected, rel=1e-12)


def test_params_restricts_the_update():
    model, loss_fn, data = tanh_network()
    loss, w = flat_loss(model, loss_fn, data, ["2.weight"])
    found = sam_update_cosine(model, loss_fn, whole(data)[0], rho=0.5, params=["2.weight"])
    assert found == pytest.approx(reference(loss, w, 0.5), rel=1e-10)


def test_an_update_without_direction_is_refused():
    model = Quadratic(torch.zeros(2, dtype=torch.float64))
    batch = (
        (torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, 2, dtype=torch.float64)),
        torch.zeros(1),
    )
    with pytest.raises(ValueError, match="An update has no direction"):
        sam_update_cosine(model, mean_output, batch, rho=0.1)
    with pytest.raises(ValueError, match="rho must be finite and not negative"):
        sam_update_cosine(model, mean_output, batch, rho=-math.inf)


def test_weight_decay_is_a_term_of_the_loss():
    """The cosine with the L2 term is that of the loss with lambda/2 |w|^2 written into it."""
    model, loss_fn, data = tanh_network()
    loss, w = flat_loss(model, loss_fn, data)
    expected = reference(lambda v: loss(v) + 0.3 / 2 * v.square().sum(), w, 2.0)
    found = sam_update_cosine(model, loss_fn, whole(data)[0], rho=2.0, weight_decay=0.3)
    assert found == pytest.approx(expected, rel=1e-10)
    assert found != pytest.approx(reference(loss, w, 2.0), rel=1e-3)
