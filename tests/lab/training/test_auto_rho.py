"""optim.rho=auto: the radius of a run is measured before its first step, recorded, and never measured again."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from flatmin.lab.errors import RunError
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.sweeps.measurements import Rho, measure_run
from flatmin.lab.training import run as run_module
from flatmin.lab.training.engine import train
from flatmin.lab.training.steps import Stepper
from flatmin.lab.training.trained_model import load_trained

DATA = Data(train_size=60, batch_size=20, augment="basic", mixup=0.5, label_noise=0.4)


def experiment(model="wrn-10-1", data=DATA, epochs=1, **optim):
    return Experiment(
        data=data,
        model=Model(name=model),
        optim=Optim(**{"rho": "auto", "lr": 0.05} | optim),
        epochs=epochs,
        keep_every=1,
        precision="float32",
    )


def by_hand(result, size, decay=0.0, norm_layers=False):
    """Return 0.1 mean(L) / mean(|g|) at the initial weights on the training batches, in pieces of `size` examples."""
    trained = load_trained(result.directory, epoch=0)
    network = trained.network.train()
    losses, norms, sizes = [], [], []
    for batch in trained.pipeline.training(trained.dataset.train, epoch=0):
        for start in range(0, len(batch.labels), size):
            rows = slice(start, start + size)
            own, other = (
                F.cross_entropy(network(batch.inputs[rows]), labels[rows])
                for labels in (batch.labels, batch.partner_labels)
            )
            loss = batch.own_weight * own + (1 - batch.own_weight) * other
            loss = loss + decay / 2 * sum(p.square().sum() for p in network.parameters())
            layers = [m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)] if norm_layers else [network]
            grads = torch.autograd.grad(loss, [p for layer in layers for p in layer.parameters()])
            norms.append(math.sqrt(sum(g.double().square().sum().item() for g in grads)))
            losses.append(loss.item())
            sizes.append(len(batch.labels[rows]))
    return (
        0.1
        * sum(n * x for n, x in zip(sizes, losses, strict=True))
        / sum(n * x for n, x in zip(sizes, norms, strict=True))
    )


@pytest.mark.parametrize(
    ("optim", "size"),
    [
        ({}, 20),
        ({"m": 5}, 5),
        ({"part": 0.25}, 5),
        ({"ascent_part": 0.5}, 10),
        ({"part": 0.5, "m": 5}, 5),
        ({"every": 2, "rho": "0.5x"}, 20),
        ({"second_order": True}, 20),
        ({"direction": "random", "rho": "2x"}, 20),
        ({"decay": "loss", "weight_decay": 0.1}, 20),
        ({"perturb": "norm"}, 20),
        ({"perturb": "norm", "direction": "random"}, 20),
    ],
    ids=str,
)
def test_radius_is_the_rule_on_as_many_examples_as_share_an_eps(optim, size, tmp_path):
    asked = experiment(**optim)
    result = train(asked, runs=tmp_path)
    rho = asked.optim.rho_factor * by_hand(result, size, optim.get("weight_decay", 0.0), "perturb" in optim)
    assert result.metrics["rho"] == pytest.approx(rho, rel=1e-4)
    assert load_trained(result.directory).rho == result.metrics["rho"]


@pytest.mark.parametrize("optim", [{}, {"every": 2}, {"second_order": True}, {"part": 0.25}], ids=str)
def test_run_is_the_one_with_the_radius_as_a_number(optim, tmp_path):
    """Measuring leaves no trace: no noise is drawn, and no running statistics are touched."""
    asked = experiment(model="shake-shake-8-2x4d", rho="0.5x", epochs=2, **optim)
    found = train(asked, runs=tmp_path)
    number = dataclasses.replace(asked, optim=dataclasses.replace(asked.optim, rho=found.metrics["rho"]))
    expected = train(number, runs=tmp_path)
    assert [{name: v for name, v in line.items() if name != "rho"} for line in found.history] == expected.history


@pytest.mark.parametrize("optim", [{}, {"every": 2}, {"second_order": True}], ids=str)
def test_resumed_run_is_exact_and_measures_nothing(optim, tmp_path, monkeypatch):
    asked = experiment(epochs=2, **optim)
    whole = train(asked, runs=tmp_path / "whole")
    step = Stepper.step

    def failing(self, batch, number, lr):
        return 1 / 0 if number == 2 else step(self, batch, number, lr)

    monkeypatch.setattr(Stepper, "step", failing)
    with pytest.raises(ZeroDivisionError):
        train(asked, runs=tmp_path / "broken", checkpoint_seconds=0)
    monkeypatch.setattr(Stepper, "step", step)
    monkeypatch.setattr(run_module, "suggestion", lambda *_: pytest.fail("measured again"))
    assert train(asked, runs=tmp_path / "broken").history == whole.history


def test_loss_without_a_radius_is_an_error_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "flatmin.lab.training.steps.Stepper.loss", lambda self, batch: self.network(batch.inputs).sum() * 0
    )
    with pytest.raises(RunError, match=r"optim.rho is auto: The loss is 0, .* choose rho by hand"):
        train(experiment(), runs=tmp_path)


@pytest.mark.parametrize("model", ["wrn-10-1", "shake-shake-8-2x4d"])
def test_measured_radius_of_a_run_at_its_start_is_the_one_it_used(model, tmp_path):
    asked = experiment(model=model, rho="0.5x", epochs=2, m=5)
    run = train(asked, seed=3, runs=tmp_path).directory
    measurements = [Rho(epoch=0), Rho(m=20, num_examples=20)]
    found = measure_run(run, measurements)
    facts, late = (found[measurement.name] for measurement in measurements)
    assert facts["rho"] / 2 == pytest.approx(load_trained(run).rho, rel=1e-5)
    assert facts["rises"][4] == pytest.approx(0.1 * facts["loss"], rel=0.5)
    assert facts["first_order"][4] == pytest.approx(0.1 * facts["loss"], rel=1e-6)
    assert len(facts["per_batch"]) == 3
    assert len(late["per_batch"]) == 1
    assert late["grad_norm"] != facts["grad_norm"]
    assert len(list(run.glob("measures/rho-*.svg"))) == 2
