import collections
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

from flatmin.measures import m_sharpness
from measures.cases import Exponential, Quadratic, flat_loss, mean_output, quadratic, tanh_network, whole


def rise(A, b, w, step):
    """L(w + step) - L(w) of a quadratic."""
    return float((A @ w + b) @ step + step @ A @ step / 2)


def trust_region(A, g, rho):
    """The maximum of g.e + e.A e / 2 over |e| = rho: (s - A) e = g with s above every eigenvalue of A."""
    values, vectors = np.linalg.eigh(A)
    c = vectors.T @ g

    def excess(s):
        return np.linalg.norm(c / (s - values)) - rho

    top = values[-1]
    s = brentq(excess, top + 1e-9, top + np.linalg.norm(g) / rho + 1, xtol=1e-14)
    e = vectors @ (c / (s - values))
    return float(g @ e + e @ A @ e / 2)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_one_step_on_a_quadratic_is_the_rise_at_the_end_of_eq_2(p):
    model, data, A, b, w = quadratic()
    A, b = A.mean(0), b.mean(0)
    g = A @ w + b
    if p == 1:
        step = torch.where(g.abs() == g.abs().max(), g.sign(), 0.0)
    else:
        q = 1.0 if math.isinf(p) else p / (p - 1)
        step = g.sign() * g.abs() ** (q - 1)
        step = step / torch.linalg.vector_norm(step, p)
    found = m_sharpness(model, mean_output, data, rho=0.3, p=p)
    assert found.mean == pytest.approx(rise(A, b, w, 0.3 * step), rel=1e-12)
    assert found.per_subset.shape == (1,)
    assert math.isnan(found.standard_error)


def test_one_step_keeps_a_negative_sign():
    """At w = 1 of -w^2 / 2 + 1.1 w the step of 0.5 overshoots the top at 1.1: 0.1 * 0.5 - 0.125 = -0.075."""
    A = -torch.eye(2, dtype=torch.float64)[None]
    b = torch.tensor([[1.1, 0.0]], dtype=torch.float64)
    model = Quadratic(torch.tensor([1.0, 0.0], dtype=torch.float64))
    data = [((A, b), torch.zeros(1))]
    assert m_sharpness(model, mean_output, data, rho=0.5).mean == pytest.approx(-0.075, rel=1e-12)
    # With several steps the best visited point counts, and the weights themselves were visited.
    assert m_sharpness(model, mean_output, data, rho=0.5, steps=2).mean >= 0.0


def test_several_steps_keep_zero_when_every_visited_point_is_lower():
    """Near the top of a concave, skew quadratic two steps of length 1 lead down, and not back to where they began."""
    model = Quadratic(torch.tensor([1e-3, 2e-3], dtype=torch.float64))
    A = -torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))[None]
    data = [((A, torch.zeros(1, 2, dtype=torch.float64)), torch.zeros(1))]
    assert m_sharpness(model, mean_output, data, rho=1.0, steps=1).mean < 0.0
    assert m_sharpness(model, mean_output, data, rho=1.0, steps=2).mean == 0.0


def test_several_steps_in_l2_reach_the_trust_region_closed_form():
    model, data, A, b, w = quadratic()
    A, b = A.mean(0), b.mean(0)
    best = trust_region(A.numpy(), (A @ w + b).numpy(), 0.7)
    found = m_sharpness(model, mean_output, data, rho=0.7, steps=100)
    assert found.mean == pytest.approx(best, rel=1e-8)
    one = m_sharpness(model, mean_output, data, rho=0.7).mean
    assert one < best - 1e-3


def test_several_steps_in_l_inf_reach_the_best_corner():
    model, data, A, b, w = quadratic(seed=5)
    A, b = A.mean(0), b.mean(0)
    corners = [0.4 * torch.tensor(c, dtype=torch.float64) for c in itertools.product((-1.0, 1.0), repeat=6)]
    best = max(rise(A, b, w, corner) for corner in corners)
    assert m_sharpness(model, mean_output, data, rho=0.4, p=math.inf, steps=20).mean == pytest.approx(best, rel=1e-12)


def test_several_steps_stay_in_the_ball():
    """On a linear loss the rise within the ball is rho |g|, however many steps one takes."""
    model = Quadratic(torch.zeros(4, dtype=torch.float64))
    b = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    data = [((torch.zeros(1, 4, 4, dtype=torch.float64), b), torch.zeros(1))]
    for p, dual in ((2.0, 2), (math.inf, 1), (1.0, math.inf)):
        found = m_sharpness(model, mean_output, data, rho=0.5, p=p, steps=4)
        assert found.mean == pytest.approx(0.5 * float(torch.linalg.vector_norm(b, dual)), rel=1e-12)


@pytest.mark.parametrize("m", [1, 3, 4, 7, 10])
def test_the_mean_over_subsets_weights_a_ragged_last_one(m):
    model, data, A, b, w = quadratic()
    rises, sizes = [], []
    for start in range(0, 10, m):
        part_A, part_b = A[start : start + m].mean(0), b[start : start + m].mean(0)
        g = part_A @ w + part_b
        rises.append(rise(part_A, part_b, w, 0.1 * g / g.norm()))
        sizes.append(min(m, 10 - start))
    found = m_sharpness(model, mean_output, data, rho=0.1, m=m)
    np.testing.assert_allclose(found.per_subset, rises, rtol=1e-10)
    assert found.sizes.tolist() == sizes
    assert found.mean == pytest.approx(np.average(rises, weights=sizes), rel=1e-12)
    loss, vector = flat_loss(model, mean_output, data)
    assert found.value == pytest.approx(float(loss(vector)), rel=1e-12)


def test_the_standard_error_is_that_of_a_mean_where_subsets_are_equal():
    model, data, *_ = quadratic()
    found = m_sharpness(model, mean_output, data, m=2)
    expected = np.std(found.per_subset, ddof=1) / math.sqrt(5)
    assert found.standard_error == pytest.approx(expected, rel=1e-12)


def test_the_standard_error_of_ragged_subsets_weights_them():
    model, data, *_ = quadratic()
    found = m_sharpness(model, mean_output, data, m=4)
    share = np.array([4, 4, 2]) / 10
    expected = math.sqrt(1.5 * (share**2 @ (found.per_subset - found.mean) ** 2))
    assert found.standard_error == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("m", "chunk_size"), [(None, None), (None, 3), (5, 2), (7, None), (20, 1)])
def test_however_the_data_is_batched_or_chunked_the_subsets_are_the_same(m, chunk_size):
    model, loss_fn, data = tanh_network()
    expected = m_sharpness(model, loss_fn, whole(data), m=m)
    found = m_sharpness(model, loss_fn, data, m=m, chunk_size=chunk_size)
    np.testing.assert_allclose(found.per_subset, expected.per_subset, rtol=1e-10)


def test_no_more_than_the_chunk_size_runs_at_once():
    model, loss_fn, data = tanh_network()
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    m_sharpness(model, loss_fn, whole(data), m=10, chunk_size=3)
    passes = seen[4:]  # the first four are the probe's
    assert max(passes) == 3
    assert sum(passes) == 2 * 20  # one gradient and one loss over all examples, no more


def test_the_error_rate_is_reported_where_the_loss_is_ascended():
    model, loss_fn, data = tanh_network()
    loss, vector = flat_loss(model, loss_fn, data)
    step = torch.autograd.functional.jacobian(loss, vector)
    point = vector + 2.0 * step / step.norm()
    errors = []
    for at in (vector, point):
        wrong = 0
        for x, y in data:
            hidden = torch.tanh(x @ at[:24].view(6, 4).T + at[24:30])
            logits = hidden @ at[30:60].view(5, 6).T + at[60:]
            wrong += int((logits.argmax(1) != y).sum())
        errors.append(wrong / 20)
    found = m_sharpness(model, loss_fn, data, rho=2.0, metric="error")
    assert errors[0] != errors[1]
    assert found.mean == pytest.approx(errors[1] - errors[0], abs=1e-12)
    assert found.value == pytest.approx(errors[0], abs=1e-12)


def test_adaptive_measures_in_the_ball_of_asam():
    """With T = rho (|w| + eta), eps = T * (T g / |T g|) (Kwon et al., 2021)."""
    model, data, A, b, w = quadratic()
    A, b = A.mean(0), b.mean(0)
    for adaptive, eta in ((True, 0.01), (0.0, 0.0), (0.5, 0.5)):
        T = 0.2 * (w.abs() + eta)
        u = T * (A @ w + b)
        found = m_sharpness(model, mean_output, data, rho=0.2, adaptive=adaptive)
        assert found.mean == pytest.approx(rise(A, b, w, T * u / u.norm()), rel=1e-12)


def test_several_adaptive_steps_stay_in_the_ball_of_asam_even_where_a_weight_is_zero():
    """On a linear loss g the best point of |eps / T| <= 1 rises by |T g|, and a zero weight does not move."""
    w = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64)
    g = torch.tensor([[5.0, 1.0, 1.0, -1.0]], dtype=torch.float64)
    data = [((torch.zeros(1, 4, 4, dtype=torch.float64), g), torch.zeros(1))]
    found = m_sharpness(Quadratic(w), mean_output, data, rho=0.1, adaptive=0.0, steps=3)
    assert found.mean == pytest.approx(0.1 * float((w.abs() * g).norm()), rel=1e-12)


def test_params_restricts_the_perturbation():
    model, data, A, b, w = quadratic()
    A, b = A.mean(0), b.mean(0)
    g = A @ w + b
    g[3:] = 0.0
    expected = rise(A, b, w, 0.3 * g / g.norm())
    assert m_sharpness(model, mean_output, data, rho=0.3, params=[model.first]).mean == pytest.approx(expected)
    assert m_sharpness(model, mean_output, data, rho=0.3, params=["first"]).mean == pytest.approx(expected)


def test_rho_zero_gives_exactly_zero():
    model, loss_fn, data = tanh_network()
    assert m_sharpness(model, loss_fn, data, rho=0.0, m=5).per_subset.tolist() == [0.0] * 4


def test_a_bfloat16_model_is_measured_as_its_float32_copy():
    model, loss_fn, data = tanh_network(dtype=torch.bfloat16)
    copy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    copy.load_state_dict(model.state_dict())
    expected = m_sharpness(copy, loss_fn, [(x.float(), y) for x, y in data], m=5)
    found = m_sharpness(model, loss_fn, data, m=5)
    np.testing.assert_array_equal(found.per_subset, expected.per_subset)
    assert found.mean > 0


def test_dictionaries_and_tuples_of_inputs_are_sliced():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, a, b):
            return (a * self.weight[0] + b * self.weight[1]) ** 2

    a, b = torch.arange(6, dtype=torch.float64), torch.arange(6, dtype=torch.float64) ** 2
    expected = m_sharpness(Named(), mean_output, [((a, b), torch.zeros(6))], m=2)
    pair = collections.namedtuple("Pair", ["a", "b"])(a, b)
    for inputs in ({"a": a, "b": b}, collections.UserDict(a=a, b=b), [a, b], pair):
        found = m_sharpness(Named(), mean_output, [(inputs, torch.zeros(6))], m=2)
        np.testing.assert_array_equal(found.per_subset, expected.per_subset)
    assert len(set(found.per_subset)) == 3


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rho": -1.0}, ValueError, "rho must be finite and not negative, got -1.0"),
        ({"rho": "a"}, TypeError, "rho must be a number"),
        ({"p": 0.5}, ValueError, r"p must be in \[1, inf\], got 0.5"),
        ({"p": 3.0, "steps": 2}, ValueError, "p must be 1, 2 or inf with several steps, got 3.0"),
        ({"m": 21}, ValueError, "m must be at most the number of examples, 20, got 21"),
        ({"m": 0}, ValueError, "m must be at least 1, got 0"),
        ({"m": 2.5}, TypeError, "m must be an integer, got 2.5"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"metric": "accuracy"}, ValueError, 'metric must be "loss" or "error", got \'accuracy\''),
        ({"adaptive": -0.5}, ValueError, "adaptive, as ASAM's eta, must be finite and not negative, got -0.5"),
        ({"params": []}, ValueError, "params is empty"),
        ({"params": ["no"]}, ValueError, "params holds 'no', which is not a parameter of the model"),
        ({"params": "0.weight"}, TypeError, "params must be an iterable"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, error, message):
    model, loss_fn, data = tanh_network()
    with pytest.raises(error, match=message):
        m_sharpness(model, loss_fn, data, **settings)


def test_a_loss_that_overflows_at_the_perturbed_weights_is_refused():
    data = [(torch.ones(3, dtype=torch.float64), torch.zeros(3))]
    with pytest.raises(ValueError, match="The loss is inf at the perturbed weights; try a smaller rho"):
        m_sharpness(Exponential(), mean_output, data, rho=1e4)


def test_a_plot_shows_the_mean():
    model, loss_fn, data = tanh_network()
    figure = m_sharpness(model, loss_fn, data, m=5).plot()
    assert "m = 5" in figure.axes[0].get_title()
