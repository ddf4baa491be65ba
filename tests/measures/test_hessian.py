import importlib
import math

import numpy as np
import pytest
import scipy.integrate
import torch
from torch import nn

from flatmin.measures import GGNOperator, HessianOperator, SpectralDensity, spectral_density, top_eigenvalues
from measures.cases import Quadratic, dense_hessian, diagonal, mean_output, quadratic, tanh_network, whole


def tanh_operator(batched=True):
    model, loss_fn, data = tanh_network()
    data = data if batched else whole(data)
    return HessianOperator(model, loss_fn, data), dense_hessian(model, loss_fn, data)


@pytest.mark.parametrize("batched", [True, False])
def test_products_with_a_quadratic_are_a_v(batched):
    model, data, A, *_ = quadratic()
    op = HessianOperator(model, mean_output, data if batched else whole(data))
    v = torch.arange(6, dtype=torch.float64)
    assert op.dim == 6
    torch.testing.assert_close(op @ v, A.mean(0) @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op @ torch.eye(6, dtype=torch.float64), A.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batched", [True, False])
def test_products_with_a_network_are_those_of_its_dense_hessian(batched):
    op, H = tanh_operator(batched)
    torch.testing.assert_close(op @ torch.eye(65, dtype=torch.float64), H, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("edit", ["in place", "data", "swap"])
@pytest.mark.parametrize("batched", [True, False])
def test_products_follow_a_weight_that_was_edited(edit, batched):
    model, loss_fn, data = tanh_network()
    data = data if batched else whole(data)
    op = HessianOperator(model, loss_fn, data)
    v = torch.ones(65, dtype=torch.float64)
    before = op @ v
    weight = model[0].weight
    if edit == "in place":
        with torch.no_grad():
            weight.mul_(1.5)
    elif edit == "data":
        weight.data.mul_(1.5)  # leaves no trace in the version counter
    else:
        weight.data = weight.data * 1.5
    after = op @ v
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, dense_hessian(model, loss_fn, data) @ v, rtol=1e-10, atol=1e-12)


def test_products_follow_a_buffer_that_was_edited():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1]))]
    op = HessianOperator(model, nn.CrossEntropyLoss(), data)
    v = torch.ones(op.dim, dtype=torch.float64)
    before = op @ v
    model[1].running_var.fill_(4.0)
    assert not torch.allclose(before, op @ v)
    torch.testing.assert_close(op @ v, dense_hessian(model, nn.CrossEntropyLoss(), data) @ v)


def test_params_gives_one_block_of_the_hessian():
    model, loss_fn, data = tanh_network()
    op = HessianOperator(model, loss_fn, data, params=model[2].parameters())
    H = dense_hessian(model, loss_fn, data)
    assert op.dim == 35
    torch.testing.assert_close(op @ torch.eye(35, dtype=torch.float64), H[30:, 30:], rtol=1e-10, atol=1e-12)


def test_a_frozen_parameter_is_left_out_unless_it_is_named():
    model, loss_fn, data = tanh_network()
    model[0].requires_grad_(False)
    assert HessianOperator(model, loss_fn, data).dim == 35
    assert HessianOperator(model, loss_fn, data, params=["0.bias"]).dim == 6


def test_a_weight_without_curvature_or_without_use_has_zero_rows():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.linear, self.unused = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))

        def forward(self, x):
            return x * (self.used**2).sum() + x * self.linear.sum()

    data = [(torch.ones(3, dtype=torch.float64), torch.zeros(3))]
    for batches in (data, data * 2):
        op = HessianOperator(Partly(), mean_output, batches)
        expected = torch.diag(torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64))
        torch.testing.assert_close(op @ torch.eye(6, dtype=torch.float64), expected)
        only = HessianOperator(Partly(), mean_output, batches, params=["linear"])
        torch.testing.assert_close(only @ torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False).double()
            self.b = nn.Linear(2, 2, bias=False).double()
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x))).sum(1)

    torch.manual_seed(0)
    model = Tied()
    data = [(torch.randn(4, 2, dtype=torch.float64), torch.zeros(4))]
    op = HessianOperator(model, mean_output, data)

    def loss(weight):
        return (torch.tanh(data[0][0] @ weight.view(2, 2).T) @ weight.view(2, 2).T).sum(1).mean()

    H = torch.autograd.functional.hessian(loss, model.a.weight.detach().flatten())
    torch.testing.assert_close(op @ torch.eye(4, dtype=torch.float64), H)


def test_attention_has_products_though_its_fused_kernel_has_no_second_derivative():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 2).double())
    data = [(torch.randn(4, 3, 8, dtype=torch.float64), torch.tensor([0, 1, 0, 1]))]
    op = HessianOperator(model, nn.CrossEntropyLoss(), data)
    u, v = torch.randn(2, op.dim, dtype=torch.float64)
    assert float(u @ (op @ v)) == pytest.approx(float(v @ (op @ u)), rel=1e-9)
    assert float((op @ v).norm()) > 0


def test_float32_and_bfloat16_models_have_float32_products():
    for dtype in (torch.float32, torch.bfloat16):
        model, loss_fn, data = tanh_network(dtype=dtype)
        op = HessianOperator(model, loss_fn, data)
        v = torch.ones(65)
        wide = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
        wide.load_state_dict(model.state_dict())
        H = dense_hessian(wide, loss_fn, [(x.double(), y) for x, y in data])
        assert (op @ v).dtype == torch.float32
        torch.testing.assert_close((op @ v).double(), H @ v.double(), rtol=1e-4, atol=1e-5)


def test_the_trace_is_exact_where_there_are_no_more_weights_than_probes():
    op, H = tanh_operator()
    assert op.trace() == pytest.approx(float(H.trace()), rel=1e-12)


def test_the_trace_by_random_signs_is_hutchinsons():
    """Its variance is 2 sum_{i != j} H_ij^2 / probes; and for a diagonal Hessian it is exact."""
    op, H = tanh_operator()
    spread = math.sqrt(2 * float((H**2).sum() - (H.diag() ** 2).sum()) / 64)
    found = op.trace(probes=64, seed=3)
    assert abs(found - float(H.trace())) < 4 * spread
    assert found != pytest.approx(float(H.trace()), rel=1e-6)
    assert found == op.trace(probes=64, seed=3)
    assert found != op.trace(probes=64, seed=4)
    model, data = diagonal(np.arange(1.0, 9.0))
    assert HessianOperator(model, mean_output, data).trace(probes=1) == pytest.approx(36.0, rel=1e-12)


def test_the_search_stops_at_the_residual_that_was_asked_for():
    model, data = diagonal(np.concatenate([np.linspace(0, 1, 200), [2.0, 3.0, 5.0]]))
    op = HessianOperator(model, mean_output, data)
    loose, tight = (top_eigenvalues(op, k=3, tol=tol) for tol in (1e-2, 1e-8))
    assert loose.num_products < tight.num_products < 203
    for found, tol in ((loose, 1e-2), (tight, 1e-8)):
        assert found.converged
        assert np.all(found.residuals <= tol * np.abs(found.values))
        np.testing.assert_allclose(found.values, [5.0, 3.0, 2.0], rtol=tol)
    assert np.any(loose.residuals > 1e-8 * loose.values)


@pytest.mark.parametrize(
    ("which", "expected", "places"),
    [("largest", [2.0, 1.0, 0.5], [4, 3, 2]), ("smallest", [-9.0, -8.0, -1.0], [0, 1, 5])],
)
def test_eigenvalues_are_algebraic_and_not_by_magnitude(which, expected, places):
    model, data = diagonal([-9.0, -8.0, 0.5, 1.0, 2.0, -1.0])
    found = top_eigenvalues(HessianOperator(model, mean_output, data), k=3, which=which)
    np.testing.assert_allclose(found.values, expected, rtol=1e-9)
    vectors = torch.eye(6, dtype=torch.float64)[:, places]
    torch.testing.assert_close(found.vectors.abs(), vectors, rtol=0, atol=1e-9)


@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_eigenvalues_of_a_network_are_those_of_its_dense_hessian(which):
    op, H = tanh_operator()
    values, vectors = torch.linalg.eigh(H)
    assert values[4] < 0
    if which == "largest":
        values, vectors = values.flip(0), vectors.flip(1)
    found = top_eigenvalues(op, k=5, which=which, tol=1e-8)
    assert found.converged
    np.testing.assert_allclose(found.values, values[:5].numpy(), rtol=1e-10)
    overlap = (found.vectors * vectors[:, :5]).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones(5, dtype=torch.float64), rtol=1e-8, atol=0)
    true = torch.linalg.vector_norm(H @ found.vectors - found.vectors * torch.tensor(found.values), dim=0)
    np.testing.assert_allclose(found.residuals, true.numpy(), atol=1e-12)
    assert found.ratio(1, 5) == pytest.approx(float(values[0] / values[4]), rel=1e-10)


@pytest.mark.parametrize(
    ("values", "k"),
    [
        ([3.0] * 8, 8),
        ([5.0, 5.0] + [1.0] * 10, 2),
        ([5.0, 5.0] + [1.0] * 10, 3),
        ([0.0] * 6, 3),
        ([4.0, 0.0, 0.0, 0.0, 0.0, 0.0], 4),
        ([7.0, 7.0, 7.0, 2.0, 2.0, -1.0], 6),
    ],
)
def test_multiple_eigenvalues_count_as_often_as_they_occur(values, k):
    model, data = diagonal(values)
    found = top_eigenvalues(HessianOperator(model, mean_output, data), k=k)
    np.testing.assert_allclose(found.values, sorted(values, reverse=True)[:k], atol=1e-9)
    gram = found.vectors.T @ found.vectors
    torch.testing.assert_close(gram, torch.eye(k, dtype=torch.float64), atol=1e-9, rtol=0)


def test_lanczos_at_dim_steps_finds_every_eigenvalue_once():
    """Well separated leading eigenvalues converge early, and their ghosts would push others out."""
    values = np.concatenate([10.0 ** np.arange(1, 5), np.linspace(-1, 1, 76)])
    model, data = diagonal(values, w=torch.ones(80, dtype=torch.float64))
    found = top_eigenvalues(HessianOperator(model, mean_output, data), k=80)
    np.testing.assert_allclose(found.values, np.sort(values)[::-1], rtol=1e-8, atol=1e-8)


def test_a_float32_search_has_no_ghosts_either():
    values = np.concatenate([[100.0, 50.0, 20.0], np.linspace(0, 1, 97)])
    model, data = diagonal(values)
    model = model.float()
    data = [((A.float(), b.float()), y) for (A, b), y in data]
    found = top_eigenvalues(HessianOperator(model, mean_output, data), k=10, tol=1e-4)
    np.testing.assert_allclose(found.values[:3], [100.0, 50.0, 20.0], rtol=1e-4)
    assert np.all(found.values[3:] < 1.01)


def test_no_convergence_is_a_warning_with_the_best_values():
    model, data = diagonal(np.linspace(0, 1, 100))
    op = HessianOperator(model, mean_output, data)
    with pytest.warns(RuntimeWarning, match=r"did not converge in 6 products.*Raise max_iter or tol"):
        found = top_eigenvalues(op, k=5, tol=1e-10, max_iter=6)
    assert not found.converged
    assert found.num_products == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 66}, "k must be at most the number of weights, 65, got 66"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": 5, "max_iter": 4}, "max_iter must be at least k = 5"),
        ({"tol": 0.0}, "tol must be positive, got 0.0"),
        ({"which": "SA"}, 'which must be "largest" or "smallest", got \'SA\''),
    ],
)
def test_bad_settings_of_the_search_are_refused(settings, message):
    op, _ = tanh_operator()
    with pytest.raises(ValueError, match=message):
        top_eigenvalues(op, **settings)


@pytest.mark.parametrize("measure", [top_eigenvalues, spectral_density])
def test_a_model_in_place_of_an_operator_is_refused_with_the_remedy(measure):
    with pytest.raises(TypeError, match=r"got Linear. Pass HessianOperator\(model, loss_fn, data\)"):
        measure(nn.Linear(2, 1))


def test_a_vector_of_another_length_is_refused():
    op, _ = tanh_operator()
    with pytest.raises(ValueError, match=r"products with tensors \(65,\) or \(65, k\), got \(3,\)"):
        op @ torch.ones(3)
    with pytest.raises(ValueError, match="eigenvalues count from 1"):
        top_eigenvalues(op, k=2).ratio(0, 1)


def test_a_product_that_is_not_finite_is_refused():
    model = Quadratic(torch.ones(2, dtype=torch.float64))
    data = [
        (
            (torch.full((1, 2, 2), math.inf, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)),
            torch.zeros(1),
        )
    ]
    op = HessianOperator(model, mean_output, data)
    with pytest.raises(ValueError, match="not finite"):
        top_eigenvalues(op, k=1)


def test_the_full_density_of_a_network_is_the_weight_of_each_probe_on_each_eigenvector():
    op, H = tanh_operator()
    values, vectors = torch.linalg.eigh(H)
    found = spectral_density(op, steps=65, probes=3, seed=7)
    generator = torch.Generator().manual_seed(7)
    expected = torch.zeros(65, dtype=torch.float64)
    for _ in range(3):
        signs = (2 * torch.randint(2, (65,), generator=generator) - 1).double()
        expected += (vectors.T @ signs) ** 2 / 65 / 3
    grid = np.linspace(-0.5, float(values[-1]) + 0.5, 300)
    dense = SpectralDensity(values.numpy(), expected.numpy())
    np.testing.assert_allclose(found.density(grid, 0.05), dense.density(grid, 0.05), atol=1e-8)


def test_many_probes_give_the_density_of_the_dense_spectrum():
    op, H = tanh_operator(batched=False)
    values = torch.linalg.eigvalsh(H).numpy()
    grid = np.linspace(-0.5, 1.5, 60)
    dense = SpectralDensity(values, np.full(65, 1 / 65)).density(grid, 0.2)
    found = spectral_density(op, steps=30, probes=40).density(grid, 0.2)
    assert np.abs(found - dense).max() < 0.05 * dense.max()


@pytest.mark.parametrize("steps", [1, 7, 80])
def test_quadrature_weights_sum_to_one_and_integrate_polynomials(steps):
    op, H = tanh_operator()
    found = spectral_density(op, steps=steps, probes=4, seed=1)
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.all(np.diff(found.nodes) >= 0)
    generator = torch.Generator().manual_seed(1)
    signs = [(2 * torch.randint(2, (65,), generator=generator) - 1).double() for _ in range(4)]
    for degree in range(min(2 * steps, 12)):
        expected = np.mean([float(z @ torch.linalg.matrix_power(H, degree) @ z) / 65 for z in signs])
        assert found.weights @ found.nodes**degree == pytest.approx(expected, rel=1e-9)


def test_the_density_integrates_to_one_and_needs_a_width():
    found = SpectralDensity(np.array([0.0, 2.0]), np.array([0.25, 0.75]))
    grid = np.linspace(-2, 4, 2001)
    density = found.density(grid, 0.1)
    assert scipy.integrate.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-6)
    peak = 0.75 / (0.1 * math.sqrt(2 * math.pi))
    assert density.max() == pytest.approx(peak, rel=1e-3)
    with pytest.raises(ValueError, match="sigma must be positive, got 0"):
        found.density(grid, 0)


def test_plots_are_drawn():
    op, _ = tanh_operator()
    assert top_eigenvalues(op, k=3).plot().axes
    assert spectral_density(op, steps=10).plot().axes


@pytest.mark.filterwarnings("ignore")  # its own, of torchvision and torch.jit
def test_curvlinops_agrees():
    curvlinops = import_curvlinops()
    model, loss_fn, data = tanh_network()
    v = torch.arange(65, dtype=torch.float64)
    for name, operator in (("HessianLinearOperator", HessianOperator), ("GGNLinearOperator", GGNOperator)):
        oracle = getattr(curvlinops, name)(model, loss_fn, list(model.parameters()), data)
        torch.testing.assert_close(operator(model, loss_fn, data) @ v, oracle @ v, rtol=1e-9, atol=1e-9)


def import_curvlinops():
    """Import it although the compiled operators of its torchvision may not load: their names suffice."""
    if importlib.util.find_spec("curvlinops") is None:
        pytest.skip("curvlinops is not installed")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    KEPT.append(library)
    return importlib.import_module("curvlinops")


KEPT = []  # a library that is collected takes its names along
