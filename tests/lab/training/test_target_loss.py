"""Runs that stop in a band around an evaluated training loss, after the learning rate has decayed."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from flatmin.lab.errors import InterruptedRun, SpecError
from flatmin.lab.runs.checkpoint import latest_checkpoint
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.engine import train
from flatmin.lab.training.schedule import settles, settling_factor
from flatmin.lab.training.session import Callback
from flatmin.lab.training.trained_model import load_trained

EXPERIMENT = Experiment(
    data=Data(train_size=80, batch_size=20, augment="flip"),
    model=Model(name="wrn-10-1", dropout=0.2),
    optim=Optim(lr=0.05, schedule="constant"),
    epochs=30,
    evaluate_every=100,
    target_loss=0.3,
    precision="float32",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    torch.set_num_threads(1)
    return train(EXPERIMENT, runs=tmp_path_factory.mktemp("runs"))


def test_a_run_stops_in_the_band_with_a_small_learning_rate_and_is_tested_there(stopped):
    assert len(stopped.history) < 30
    assert 0.27 <= stopped.metrics["fit_loss"] <= 0.33
    assert stopped.metrics["lr"] <= 0.1 * 0.05 * (1 + 1e-9)
    assert stopped.metrics["test_error"] is not None
    assert all(line["fit_loss"] > 0.33 for line in stopped.history[:-1])


def test_the_loss_is_of_all_training_images_without_augmentation_and_dropout(stopped):
    trained = load_trained(stopped.directory)
    ((inputs, labels),) = trained.batches(trained.dataset.train)
    with torch.no_grad():
        logits = trained.network.eval().double()(inputs.double())
    assert len(labels) == 80
    assert stopped.metrics["fit_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert stopped.metrics["fit_error"] == pytest.approx((logits.argmax(1) != labels).double().mean().item())


def test_each_epoch_has_the_learning_rate_that_the_losses_before_it_ask_for(stopped):
    losses = [line["fit_loss"] for line in stopped.history]
    expected = [0.05 * settling_factor(losses[:epoch], 0.3, 30) for epoch in range(len(losses))]
    assert [line["lr"] for line in stopped.history] == expected
    assert expected[0] == 0.05
    assert expected[-1] < expected[0]


class Stop(Callback):
    """Interrupts a run after a number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step(self, step, num_examples, measured):
        import os
        import signal

        if step == self.steps:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_interrupted_again_and_again_ends_bit_identical(stopped, tmp_path):
    num_steps = 4 * len(stopped.history)
    for steps in (3, 4 * (len(stopped.history) - 2), num_steps - 2):  # while it decays, too
        with pytest.raises(InterruptedRun):
            train(EXPERIMENT, runs=tmp_path, callback=Stop(steps))
    resumed = train(EXPERIMENT, runs=tmp_path)
    assert resumed.history == stopped.history
    found, expected = (latest_checkpoint(run.directory / "checkpoints")["model"] for run in (resumed, stopped))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def slow_factor(losses, target, epochs):
    """The rule, epoch by epoch, from its description."""
    factor = 1.0
    for epoch in range(1, len(losses) + 1):
        so_far = losses[:epoch]
        if factor < 1:
            before, now = so_far[-2:]
            wanted = max(target / now, 0.8)
            change = 2.0 if now >= before else math.log(wanted) / math.log(now / before)
            factor *= sorted((0.25, change, 2.0))[1]
        if min(so_far) <= 10 * target or epoch >= epochs / 2:
            factor = min(factor, 0.3)
        if min(so_far) <= 4 * target or epoch >= 3 * epochs / 4:
            factor = min(factor, 0.1)
    return factor


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [2.0, 1.0, 0.9, 0.51],
        [2.0, 0.5],
        [2.0, 0.5, 0.45, 0.47, 0.3, 0.29],
        [2.0, 0.5, 0.2, 0.1, 0.099, 0.07],
        [2.0, 0.15, 0.14],
        [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1],
        [0.6, 0.4, 0.8, 0.7],  # it stays decayed
    ],
)
def test_the_factor_follows_the_rule(losses):
    for epoch in range(len(losses) + 1):
        assert settling_factor(losses[:epoch], 0.05, 12) == pytest.approx(slow_factor(losses[:epoch], 0.05, 12))


def test_where_the_logarithm_of_the_loss_falls_in_proportion_to_the_rate_the_band_is_not_jumped_over():
    for speed in (0.5, 3.0, 30.0):  # at full rate the loss falls by exp(-speed) per epoch, from where it decays on
        losses = [0.49]
        while not settles(losses[-1], 0.05):
            losses.append(losses[-1] * math.exp(-speed * settling_factor(losses, 0.05, 10**6)))
        falls = [after / before for before, after in pairwise(losses)]
        if speed < 30:  # the first epoch, of 0.3 of the rate, is before there is a pace
            assert 0.045 <= losses[-1] <= 0.055
            assert all(fall >= 0.8 - 1e-9 for fall in falls[2:])


def test_a_loss_that_is_not_finite_changes_no_rate():
    assert settling_factor([None, None], 0.05, 100) == 1.0
    assert settling_factor([0.4, None, 0.3], 0.05, 100) <= 0.3


@pytest.mark.parametrize("change", [{"target_loss": 0.0}, {"target_loss": 0.1, "stop_loss": 0.1}])
def test_a_target_that_means_nothing_is_refused(change):
    with pytest.raises(SpecError, match="target_loss must be positive"):
        replace(EXPERIMENT, **change)


def test_specs_without_the_new_fields_keep_their_names():
    """The names of stored runs are hashes of their specs."""
    assert (
        Experiment(data=Data(name="cifar10", augment="basic")).run_hash()
        == Experiment.from_json('{"data": {"name": "cifar10", "augment": "basic"}}').run_hash()
    )
    assert replace(EXPERIMENT, target_loss=None).run_hash() != EXPERIMENT.run_hash()
