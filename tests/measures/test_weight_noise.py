"""Gaussian noise on the weights: its effect on the error rate, and average-case sharpness, in closed form."""

import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.measures import average_sharpness, m_sharpness
from flatmin.measures.weight_noise import noise_effect, proof_sigma
from measures.cases import Quadratic, assert_untouched, everything, mean_output, quadratic, tanh_network, whole


def line(weight):
    """Outputs (w x, 0): class 0 where w x is positive."""
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[weight], [0.0]])
    return model


def phi(z):
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_rise_is_the_probability_that_noise_flips_the_sign(sigma):
    """Both weights get noise: the difference of the outputs is w + sqrt(2) sigma z, P = Phi(-w / (sqrt(2) sigma)).

    With all examples alike, only the draws vary: the interval is theirs.
    """
    data = [(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))]
    found = noise_effect(line(1.0), data, sigma=sigma, num_draws=4000)
    expected = phi(-1 / (math.sqrt(2) * sigma))
    assert found.error == 0
    assert found.half_width == pytest.approx(1.96 * math.sqrt(expected * (1 - expected) / 4000), rel=0.03)
    assert abs(found.rise - expected) < 2 * found.half_width


def test_noise_lowers_the_error_where_the_weights_are_worse_than_chance():
    """The condition may fail: with the wrong sign every example is wrong, and noise can only help."""
    data = [(torch.ones(50, 1), torch.zeros(50, dtype=torch.long))]
    found = noise_effect(line(-0.1), data, sigma=1.0, num_draws=200)
    assert found.error == 1
    assert found.rise + found.half_width < 0


def test_interval_counts_the_examples_too():
    """Where noise decides on half of the examples, it is the choice of examples that is uncertain."""
    inputs = torch.tensor([[1.0], [0.0]]).repeat(50, 1)  # of two equal outputs argmax takes the first
    labels = torch.tensor([0, 0]).repeat(50)
    found = noise_effect(line(1e-9), [(inputs, labels)], sigma=1.0, num_draws=400)
    rises = [found.rise * 2, 0.0] * 50
    over_examples = statistics.stdev(rises) / math.sqrt(100)
    over_draws = 0.25 / math.sqrt(400)
    assert found.half_width == pytest.approx(1.966 * math.hypot(over_examples, over_draws), rel=0.05)


def test_without_noise_nothing_changes_and_the_model_is_left_alone():
    model = line(1.0)
    data = [(torch.randn(6, 1), torch.zeros(6, dtype=torch.long))]
    before = model.weight.clone()
    found = noise_effect(model, data, sigma=0.0, num_draws=2)
    assert (found.rise, found.half_width, found.num_draws, found.num_examples) == (0, 0, 2, 6)
    assert torch.equal(model.weight, before)


def test_norm_of_the_proofs_noise_is_below_rho():
    n, k, rho = 100, 50, 0.2
    noise = proof_sigma(rho, n=n, k=k) * torch.randn(20_000, k, generator=torch.Generator().manual_seed(0))
    assert (noise.norm(dim=1) > rho).double().mean() < 1 / math.sqrt(n)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": -1.0}, "sigma must be finite and not negative, got -1.0"),
        ({"sigma": math.inf}, "sigma must be finite"),
        ({"sigma": 1.0, "num_draws": 1}, "num_draws must be at least 2, got 1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        noise_effect(line(1.0), [(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))], **settings)


def noise(dim, rho, num, seed=0):
    """Gaussian draws, scaled to the norm rho."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(dim, generator=generator, dtype=torch.float64) for _ in range(num)]
    return [rho * z / z.norm() for z in draws]


def test_every_draw_on_a_quadratic_is_its_curvature_along_the_noise():
    """(L(w + e) + L(w - e)) / 2 - L(w) = e.A e / 2: the gradient cancels exactly."""
    model, data, A, *_ = quadratic()
    before = everything(model)
    found = average_sharpness(model, mean_output, data, 0.7, 5)
    assert_untouched(model, before)
    expected = [float(e @ A.mean(0) @ e) / 2 for e in noise(6, 0.7, 5)]
    np.testing.assert_allclose(found.per_draw, expected, rtol=1e-10)
    assert found.mean == pytest.approx(np.mean(expected), rel=1e-12)
    assert found.standard_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(5), rel=1e-10)
    assert found.value == pytest.approx(float(model(*whole(data)[0][0]).mean().detach()), rel=1e-12)
    assert found.rho == 0.7


def test_the_mean_on_a_quadratic_is_rho_squared_times_half_the_mean_eigenvalue():
    """E[e e^T] = rho^2 I / k on the sphere, and E[(e.A e)^2] = rho^4 (tr(A)^2 + 2 |A|^2) / (k (k + 2))."""
    model, data, A, *_ = quadratic()
    A, k, rho = A.mean(0), 6, 0.7
    found = average_sharpness(model, mean_output, data, rho=rho, num_draws=400)
    variance = rho**4 * (k * float((A**2).sum()) - float(A.trace()) ** 2) / (2 * k**2 * (k + 2))
    assert abs(found.mean - rho**2 * float(A.trace()) / (2 * k)) < 3 * math.sqrt(variance / 400)
    assert found.standard_error == pytest.approx(math.sqrt(variance / 400), rel=0.15)


def test_a_sphere_has_the_same_rise_in_every_draw_and_a_linear_loss_none():
    A = 3 * torch.eye(4, dtype=torch.float64)[None]
    b = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    model = Quadratic(torch.ones(4, dtype=torch.float64))
    round_bowl = average_sharpness(model, mean_output, [((A, b), torch.zeros(1))], rho=0.5, num_draws=3)
    np.testing.assert_allclose(round_bowl.per_draw, [3 * 0.25 / 2] * 3, rtol=1e-10)
    linear = average_sharpness(model, mean_output, [((0 * A, b), torch.zeros(1))], rho=0.5, num_draws=3)
    np.testing.assert_allclose(linear.per_draw, 0.0, atol=1e-14)


def test_draws_are_fixed_by_the_seed_however_the_data_is_batched_and_lie_below_the_maximum():
    model, loss_fn, data = tanh_network()
    first, again = (average_sharpness(model, loss_fn, d, rho=0.5, num_draws=4) for d in (data, whole(data)))
    np.testing.assert_allclose(first.per_draw, again.per_draw, rtol=1e-9)
    other = average_sharpness(model, loss_fn, data, rho=0.5, num_draws=4, seed=1)
    assert not np.allclose(first.per_draw, other.per_draw)
    assert first.per_draw.max() < m_sharpness(model, loss_fn, data, rho=0.5, steps=5).mean
    assert math.isnan(average_sharpness(model, loss_fn, data, num_draws=1).standard_error)


def test_params_restricts_the_noise():
    model, data, A, *_ = quadratic()
    found = average_sharpness(model, mean_output, data, rho=0.3, num_draws=2, params=["first"])
    block = A.mean(0)[:3, :3]
    np.testing.assert_allclose(found.per_draw, [float(e @ block @ e) / 2 for e in noise(3, 0.3, 2)], rtol=1e-10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho": -0.1}, r"rho .*-0\.1"),
        ({"num_draws": 0}, "num_draws must be at least 1, got 0"),
        ({"rho": 1e200}, "at the perturbed weights; try a smaller rho"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    model, data, *_ = quadratic()
    with pytest.raises(ValueError, match=message):
        average_sharpness(model, mean_output, data, **settings)


def test_a_random_model_is_refused():
    model, loss_fn, data = tanh_network()
    with pytest.raises(ValueError, match="Call model.eval"):
        average_sharpness(nn.Sequential(model, nn.Dropout(0.5)), loss_fn, data)
