"""The learning rate, in closed form."""

import math

import pytest

from flatmin.lab.spec.experiment import Optim
from flatmin.lab.training.schedule import learning_rate


def rates(num_steps=100, steps_per_epoch=10, **optim):
    return [learning_rate(Optim(lr=0.4, **optim), step, num_steps, steps_per_epoch) for step in range(num_steps)]


def test_cosine_starts_at_the_peak_and_ends_one_step_before_zero():
    for step, lr in enumerate(rates()):
        assert lr == pytest.approx(0.2 * (1 + math.cos(math.pi * step / 100)))


def test_step_multiplies_by_a_fifth_after_thirty_sixty_and_eighty_percent():
    """Wide ResNets: 60, 120 and 160 of 200 epochs."""
    found = rates(schedule="step")
    assert found[29] == 0.4
    assert found[30] == pytest.approx(0.08)
    assert found[60] == pytest.approx(0.016)
    assert found[79] == pytest.approx(0.016)
    assert found[80] == pytest.approx(0.0032)


def test_constant_stays():
    assert set(rates(schedule="constant")) == {0.4}


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
def test_warm_up_rises_linearly_to_the_peak(schedule):
    found = rates(schedule=schedule, warmup_epochs=2.5)  # 25 steps
    assert found[:25] == pytest.approx([0.4 * (step + 1) / 26 for step in range(25)])
    assert found[25] == pytest.approx(0.4)


def test_cosine_after_warm_up_spans_the_remaining_steps():
    found = rates(warmup_epochs=2)
    assert found[60] == pytest.approx(0.2)  # the middle of 20 .. 100
