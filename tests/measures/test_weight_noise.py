"""Gaussian noise on the weights: its effect on the error rate, in closed form."""

import math
import statistics

import pytest
import torch
from torch import nn

from flatmin.measures.weight_noise import noise_effect, proof_sigma


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
