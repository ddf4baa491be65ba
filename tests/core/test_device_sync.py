"""No step waits for the device."""

import math

import pytest
import torch
from torch import nn

from device_sync import NoDeviceSync
from flatmin import SAM

SETTINGS = [
    {},
    {"p": 1.0},
    {"p": 3.0},
    {"p": math.inf},
    {"adaptive": True},
    {"ascent_steps": 3},
    {"ascent_steps": 2, "p": 1.0, "adaptive": True},
    {"direction": "random"},
    {"direction": "momentum"},
    {"weight": 0.5},
]


def case(device, settings, groups=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    parameters = list(model.parameters())
    if groups:
        parameters = [{"params": parameters[:2], "sam_rho": 0.01}, {"params": parameters[2:3], "sam_rho": 0.0},
                      {"params": parameters[3:]}]  # fmt: skip
    base = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    generator = {"generator": torch.Generator()} if settings.get("direction") == "random" else {}
    opt = SAM(base, model=model, **settings, **generator)
    x, y = torch.randn(8, 4).to(device), torch.arange(8).remainder(3).to(device)

    def closure(first=0, last=8):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x[first:last]), y[first:last])
        loss.backward()
        return loss

    return opt, closure


def closure_step(opt, closure):
    opt.step(closure)


def micro_batches(opt, closure):
    opt.step([lambda: closure(0, 3), lambda: closure(3, 8)], weights=[3, 5])


def two_passes(opt, closure):
    closure()
    with opt.perturbed():
        closure()
    opt.step()


def ascent_on_other_examples(opt, closure):
    opt.step(closure, ascent=lambda: closure(0, 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("settings", "groups"), [({}, False), *((s, True) for s in SETTINGS)], ids=str)
@pytest.mark.parametrize("way", [closure_step, micro_batches, two_passes, ascent_on_other_examples])
def test_no_step_waits_for_the_device(device, settings, groups, way):
    if way is two_passes and settings.get("ascent_steps", 1) > 1:
        pytest.skip("perturbed() takes one ascent step")
    if way is ascent_on_other_examples and settings.keys() & {"direction", "weight"}:
        pytest.skip("ascent= does not go with it")
    opt, closure = case(device, settings, groups)
    with NoDeviceSync():
        for _ in range(2):
            way(opt, closure)
    assert opt.metrics.perturbation_norm.device.type == device


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("settings", [{}, {"weight": 2.0}, {"adaptive": True}], ids=str)
def test_no_step_on_a_part_of_the_batch_waits_for_the_device(device, settings):
    opt, closure = case(device, settings)
    x, y = torch.randn(8, 4).to(device), torch.arange(8).remainder(3).to(device)
    model = opt.model

    def loss_fn(inputs, labels):
        return nn.functional.cross_entropy(model(inputs), labels)

    with NoDeviceSync():
        for _ in range(2):
            opt.step(lambda: closure(0, 2), rest=lambda: closure(2, 8), weights=[2, 6])
            opt.step_batch(loss_fn, (x, y), part=0.5)
            opt.step_batch(loss_fn, (x, y), m=4)


@pytest.mark.parametrize("wait", [lambda t: t.sum().item(), lambda t: bool(t.sum() > 0), lambda t: t.nonzero()])
def test_the_mode_notices_what_waits(wait):
    with NoDeviceSync(), pytest.raises(AssertionError, match="waits"):
        wait(torch.ones(2))


@pytest.mark.parametrize(
    "copy",
    [
        lambda t: t.cpu(),
        lambda t: torch.zeros(2).copy_(t),
        lambda t: torch._foreach_copy_([torch.zeros(2), torch.zeros(2)], [torch.zeros(2), t]),
    ],
)
def test_the_mode_notices_copies_from_the_device(copy):
    with NoDeviceSync(), pytest.raises(AssertionError, match="copies from the device"):
        copy(torch.zeros(2, device="meta"))
