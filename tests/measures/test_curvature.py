import math

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.measures import GGNOperator, HessianOperator, sam_update_cosine, spectral_density, top_eigenvalues
from measures.cases import Quadratic, dense_ggn, dense_hessian, flat_loss, mean_output, quadratic, tanh_network, whole


def eye(n):
    return torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("batched", [True, False])
def test_products_are_those_of_the_dense_matrix_and_follow_a_weight_that_was_edited(batched):
    model, loss_fn, data = tanh_network()
    data = data if batched else whole(data)
    op = GGNOperator(model, loss_fn, data)
    for _ in range(2):
        G = dense_ggn(model, loss_fn, data)
        torch.testing.assert_close(op @ eye(65), G, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(G, dense_hessian(model, loss_fn, data), atol=1e-3)
        model[0].weight.data.mul_(1.5)


def test_the_spectrum_is_that_of_the_dense_matrix():
    model, loss_fn, data = tanh_network()
    op, G = GGNOperator(model, loss_fn, data), dense_ggn(model, loss_fn, data)
    values = torch.linalg.eigvalsh(G).flip(0).numpy()
    np.testing.assert_allclose(top_eigenvalues(op, k=5, tol=1e-8).values, values[:5], rtol=1e-9)
    # A shift that all classes share changes no probability: 6 + 1 weights of the last layer have no curvature.
    lowest = top_eigenvalues(op, k=2, which="smallest", max_iter=65).values
    np.testing.assert_allclose(lowest, 0.0, atol=1e-12)
    assert op.trace() == pytest.approx(float(G.trace()), rel=1e-12)
    density = spectral_density(op, steps=65, probes=1)
    pushed = op @ (2 * torch.randint(2, (65,), generator=torch.Generator().manual_seed(0)) - 1)
    assert density.weights @ density.nodes**2 == pytest.approx(float(pushed @ pushed) / 65, rel=1e-9)


def test_it_is_the_hessian_of_a_linear_model_and_a_block_with_params():
    _, loss_fn, data = tanh_network()
    linear = nn.Linear(4, 5).double()
    torch.testing.assert_close(GGNOperator(linear, loss_fn, data) @ eye(25), dense_hessian(linear, loss_fn, data))
    model, *_ = tanh_network()
    block = GGNOperator(model, loss_fn, data, params=["0.weight", "2.bias"]) @ eye(29)
    torch.testing.assert_close(block, dense_ggn(model, loss_fn, data, ["0.weight", "2.bias"]))


class TwoHeads(nn.Module):
    """Outputs of which one is computed from another, one does not depend on the weights, and one is unused."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3).double(), nn.Linear(3, 5).double()
        self.wrap = wrap

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.wrap(hidden, self.head(hidden), x, hidden**3)


class Attributes(dict):
    """As transformers' ModelOutput: entries are attributes too."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda *parts: parts, lambda outputs: outputs[:3]),
        (lambda h, z, x, u: {"h": h, "z": [z, x], "u": u}, lambda outputs: (outputs["h"], *outputs["z"])),
        (
            lambda h, z, x, u: Attributes(hidden=h, logits=z, inputs=x, unused=(u,)),
            lambda outputs: (outputs.hidden, outputs.logits, outputs.inputs),
        ),
    ],
)
def test_outputs_of_any_form_have_the_matrix_of_all_of_them(wrap, get):
    def loss_fn(outputs, targets):
        hidden, logits, inputs = get(outputs)
        return nn.functional.cross_entropy(logits, targets) + ((hidden * inputs[:, :3].exp()) ** 4).mean()

    def stacked(hidden, logits, inputs, _):
        return torch.cat([hidden, logits, inputs], 1)

    def loss_of_stacked(z, targets):
        parts = z[:, :3], z[:, 3:8], z[:, 8:]
        return nn.functional.cross_entropy(parts[1], targets) + ((parts[0] * parts[2][:, :3].exp()) ** 4).mean()

    data = tanh_network()[2]
    op = GGNOperator(TwoHeads(wrap), loss_fn, data)
    expected = dense_ggn(TwoHeads(stacked), loss_of_stacked, data)
    torch.testing.assert_close(op @ eye(op.dim), expected, rtol=1e-10, atol=1e-12)


def test_float32_images_have_the_same_products_up_to_rounding():
    """They pass through the fast second derivatives of convolutions, batch norms and ReLUs."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3)).eval()
    x, y = torch.randn(6, 2, 6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    batchings = [(x, y)], [(x[:4], y[:4]), (x[4:], y[4:])]
    found = [GGNOperator(model, nn.CrossEntropyLoss(), data) @ v for data in batchings]
    expected = dense_ggn(model.double(), nn.CrossEntropyLoss(), [(x.double(), y)]) @ v.double()
    for product in found:
        torch.testing.assert_close(product.double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_has_products():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True).double().eval()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2).double())
    data = [(torch.randn(4, 3, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 1]))]
    op = GGNOperator(model, nn.CrossEntropyLoss(), data)
    v = torch.randn(op.dim, dtype=torch.float64)
    outer = HessianOperator(model, nn.CrossEntropyLoss(), data)
    assert float(v @ (op @ v)) > 0
    assert not torch.allclose(op @ v, outer @ v)


def test_a_loss_that_is_linear_in_the_outputs_is_refused():
    model, data, *_ = quadratic()
    op = GGNOperator(model, mean_output, data)
    with pytest.raises(ValueError, match="linear in the model's outputs, so its Gauss-Newton matrix is zero"):
        op @ torch.ones(6)


def test_a_vector_of_another_length_is_refused():
    model, loss_fn, data = tanh_network()
    with pytest.raises(ValueError, match=r"GGNOperator has products with tensors \(65,\) or \(65, k\), got \(3,\)"):
        GGNOperator(model, loss_fn, data) @ torch.ones(3)


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
