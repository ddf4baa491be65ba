import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatmin.measures import m_sharpness, pac_bayes_bound
from measures.cases import flat_loss, tanh_network


class Weight(nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x):
        return (x * self.weight).sum(1)


def clipped_mean(limit):
    return lambda outputs, targets: outputs.clamp(0, limit).mean()


def ones(n, k):
    return [(torch.ones(n, k, dtype=torch.float64), torch.zeros(n))]


def test_every_term_by_hand():
    """n = 400, k = 3, |w| = sqrt(0.05), rho = 0.2, delta = 0.1; the loss is the sum of the weights, 0.35."""
    model = Weight(0.2, 0.1, 0.05)
    found = pac_bayes_bound(model, clipped_mean(1.0), ones(400, 3), rho=0.2, delta=0.1)
    squared = 0.04 + 0.01 + 0.0025
    weight_term = 3 * math.log(1 + squared / 0.04 * (1 + math.sqrt(math.log(400) / 3)) ** 2)
    assert found.loss == pytest.approx(0.35, rel=1e-12)
    assert found.sharp_loss == pytest.approx(0.35 + 0.2 * math.sqrt(3), rel=1e-12)
    assert found.weight_term == pytest.approx(weight_term, rel=1e-12)
    assert found.confidence_term == pytest.approx(4 * math.log(4000), rel=1e-12)
    assert found.union_term == pytest.approx(8 * math.log(2409), rel=1e-12)
    numerator = weight_term + 4 * math.log(4000) + 8 * math.log(2409)
    assert found.complexity == pytest.approx(math.sqrt(numerator / 399), rel=1e-12)
    assert found.total == pytest.approx(found.sharp_loss + found.complexity, rel=1e-15)
    assert found.vacuous
    assert (found.num_examples, found.num_weights) == (400, 3)
    assert found.weight_norm == pytest.approx(math.sqrt(squared), rel=1e-12)


def test_the_bound_is_not_vacuous_where_there_are_examples_enough():
    found = pac_bayes_bound(Weight(0.1), clipped_mean(1.0), ones(100_000, 1), rho=0.1)
    assert not found.vacuous
    assert found.total < 0.3
    assert "not vacuous" in str(found)
    assert str(found).startswith("estimate of the bound")


def test_a_loss_of_another_range_scales_the_complexity():
    unit = pac_bayes_bound(Weight(0.1), clipped_mean(1.0), ones(1000, 1), rho=0.1)
    wide = pac_bayes_bound(Weight(0.1), clipped_mean(4.0), ones(1000, 1), rho=0.1, loss_range=4.0)
    assert wide.complexity == pytest.approx(4 * unit.complexity, rel=1e-12)
    assert wide.sharp_loss == unit.sharp_loss
    assert not wide.vacuous
    assert pac_bayes_bound(Weight(3.9), clipped_mean(4.0), ones(1000, 1), rho=0.1, loss_range=4.0).vacuous


def test_the_error_rate_is_bounded_by_ascending_the_loss():
    model, loss_fn, data = tanh_network()
    found = pac_bayes_bound(model, loss_fn, data, rho=2.0, metric="error", steps=3)
    expected = m_sharpness(model, loss_fn, data, rho=2.0, metric="error", steps=3)
    assert found.loss == expected.value
    assert found.sharp_loss == pytest.approx(expected.value + expected.mean)
    assert found.vacuous


def test_the_sharp_loss_is_never_below_the_loss():
    """One step over the top of a tent leads down; the weights themselves are in the ball too."""

    def tent(outputs, targets):
        return (1 - (outputs - 0.6).abs()).clamp(0, 1).mean()

    found = pac_bayes_bound(Weight(0.5), tent, ones(10, 1), rho=2.0)
    assert found.sharp_loss == found.loss == pytest.approx(0.9)


def test_a_clipped_cross_entropy_is_bounded():
    model, _, data = tanh_network()

    def clipped(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none").clamp(max=3.0).mean()

    found = pac_bayes_bound(model, clipped, data, rho=0.05, loss_range=3.0)
    loss, vector = flat_loss(model, clipped, data)
    g = torch.autograd.functional.jacobian(loss, vector)
    assert found.sharp_loss == pytest.approx(float(loss(vector + 0.05 * g / g.norm())), rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho": 0.0}, "rho must be positive, got 0"),
        ({"rho": -1.0}, "rho must be finite and not negative, got -1.0"),
        ({"rho": 0.1, "delta": 0.0}, r"delta must be in \(0, 1\), got 0.0"),
        ({"rho": 0.1, "delta": 1.0}, r"delta must be in \(0, 1\), got 1.0"),
        ({"rho": 0.1, "loss_range": 0.0}, "loss_range must be positive and finite, got 0.0"),
        ({"rho": 0.1, "loss_range": math.inf}, "loss_range must be positive and finite, got inf"),
        ({"rho": 0.1, "metric": "error", "loss_range": 2.0}, "loss_range must be 1 with metric='error'"),
        ({"rho": 0.1, "metric": "top5"}, 'metric must be "loss" or "error"'),
        ({"rho": 0.1}, r"The loss is 1\.\d+, outside of \[0, 1\]\. The bound needs a known range: clip"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    model, loss_fn, data = tanh_network()
    with pytest.raises(ValueError, match=message):
        pac_bayes_bound(model, loss_fn, data, **settings)


def test_a_plot_says_whether_it_is_vacuous():
    figure = pac_bayes_bound(Weight(0.1), clipped_mean(1.0), ones(10, 1), rho=0.1).plot()
    assert "(vacuous)" in figure.axes[0].get_title()


def test_one_example_is_refused():
    with pytest.raises(ValueError, match="at least two examples, got 1"):
        pac_bayes_bound(Weight(0.1), clipped_mean(1.0), ones(1, 1), rho=0.1)
