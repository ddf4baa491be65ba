"""`check_pass` names what keeps a pass from being repeatable, and leaves everything as it was."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from flatmin import SAM, check_pass
from references import closure_of


class Meter:
    """A metric that is not torch's."""

    def __init__(self):
        self.total, self.values = 0.0, []

    def update(self, value):
        self.total += value
        self.values.append(value)


class Bank(nn.Module):
    """A criterion with a memory, as lightly's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(3))
        self.center = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, z):
        self.bank.data.lerp_(z.detach().mean(0), 0.5)
        self.center.data.lerp_(z.detach().mean(0), 0.5)
        return (z - self.bank - self.center).square().mean()


class Carried(nn.Module):
    """Keeps a hidden state in an attribute that is not a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = nn.Linear(4, 3), torch.zeros(3)

    def forward(self, x):
        z = self.layer(x) + self.hidden
        self.hidden = z.detach().mean(0)
        return z


def make(model=None, give_model=True):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model if give_model else None)
    return model, opt, torch.randn(8, 4)


def of_dropout(model, opt, x):
    return closure_of(opt, lambda: model(x).square().mean())


def of_global_noise(model, opt, x):
    return closure_of(opt, lambda: (model(x) * np.random.rand() * random.random()).square().mean())  # noqa: NPY002


def of_numpy_generator(model, opt, x):
    rng = np.random.default_rng(0)
    return closure_of(opt, lambda: (model(x) * rng.random()).square().mean())


def of_torch_generator(model, opt, x):
    generator = torch.Generator()
    return closure_of(opt, lambda: (model(x) * torch.rand(3, generator=generator)).square().mean())


def of_unseeded_noise(model, opt, x):
    return closure_of(opt, lambda: (model(x) * np.random.default_rng().random()).square().mean())


def of_memory(model, opt, x):
    criterion = Bank()
    return closure_of(opt, lambda: criterion(model(x)))


def of_counter(model, opt, x):
    scale = 1.0

    def loss_of():
        nonlocal scale
        scale *= 2
        return (scale * model(x)).square().mean()

    return closure_of(opt, loss_of)


def of_batch_in_place(model, opt, x):
    return closure_of(opt, lambda: model(x.mul_(x)).square().mean())


def of_iterator(model, opt, x):
    batches = iter([x, x.square(), x.exp()])
    return closure_of(opt, lambda: model(next(batches)).square().mean())


@pytest.mark.parametrize("make_closure", [of_dropout, of_global_noise])
def test_noise_that_sam_replays_passes(make_closure):
    model, opt, x = make()
    check = check_pass(opt, make_closure(model, opt, x))
    assert check
    assert str(check) == "The pass is repeatable."


@pytest.mark.parametrize(
    ("make_closure", "causes"),
    [
        (of_numpy_generator, ["rng: a generator"]),
        (of_torch_generator, ["generator: a generator"]),
        (of_unseeded_noise, ["a source that is not among the variables"]),
        (
            of_memory,
            ["criterion.bank: a tensor; register it as a buffer of opt.model", "criterion.center: a parameter"],
        ),
        (of_counter, ["scale: float"]),
        (of_batch_in_place, ["x: a tensor"]),
        (of_iterator, ["batches: an iterator"]),
    ],
)
def test_what_differs_is_named(make_closure, causes):
    model, opt, x = make()
    check = check_pass(opt, make_closure(model, opt, x))
    assert not check
    assert check.differences[0].startswith("loss ")
    assert len(check.causes) == len(causes)
    for found, known in zip(check.causes, causes, strict=True):
        assert found.startswith(known)
        assert found in str(check)


@pytest.mark.parametrize(("give_model", "is_repeatable"), [(True, True), (False, False)])
def test_buffers_are_a_cause_only_without_the_model(give_model, is_repeatable):
    torch.manual_seed(0)
    model, opt, x = make(nn.Sequential(nn.Linear(4, 3), Bank()), give_model)
    check = check_pass(opt, model, x)
    assert bool(check) == is_repeatable
    assert any(cause.startswith("model.1.bank") or "bank" in cause for cause in check.causes) != is_repeatable


def test_a_state_that_is_not_a_buffer_is_named_with_the_remedy():
    model, opt, x = make(Carried())
    check = check_pass(opt, lambda x: model(x).square().mean(), x)
    assert check.causes == ("model.hidden: a tensor; register it as a buffer of opt.model, or change a copy",)


def test_metrics_that_count_twice_are_side_effects():
    model, opt, x = make()
    meter = Meter()

    def loss_fn(x):
        loss = model(x).square().mean()
        meter.update(loss.item())
        return loss

    check = check_pass(opt, loss_fn, (x,))
    assert check
    assert set(check.side_effects) == {"meter.total: float", "meter.values: list"}
    assert (meter.total, meter.values) == (0.0, [])


def everything(model, opt, x):
    return (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(opt.state_dict()),
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [id(p.grad) for p in model.parameters()],
        x.clone(),
        torch.get_rng_state(),
        repr(random.getstate()) + str(np.random.get_state()[1].sum()),  # noqa: NPY002
    )


@pytest.mark.parametrize("fails_in", [None, 1, 2])
@pytest.mark.parametrize("make_closure", [of_dropout, of_memory, of_batch_in_place, of_global_noise])
def test_everything_is_left_as_it_was(make_closure, fails_in):
    model, opt, x = make()
    opt.step(of_dropout(model, opt, x))
    closure = make_closure(model, opt, x)
    before = everything(model, opt, x)
    calls = []

    def failing():
        loss = closure()
        calls.append(1)
        if len(calls) == fails_in:
            raise RuntimeError("no data")
        return loss

    if fails_in is None:
        check_pass(opt, closure)
    else:
        with pytest.raises(RuntimeError, match="no data"):
            check_pass(opt, failing)
    for now, then in zip(everything(model, opt, x), before, strict=True):
        if isinstance(now, str):
            assert now == then
        else:
            torch.testing.assert_close(now, then, rtol=0, atol=0)
    assert not opt.is_perturbed


def test_a_pass_that_waits_for_its_step_is_not_lost():
    model, opt, x = make()
    opt.zero_grad()
    model(x).square().mean().backward()
    with opt.perturbed():
        model(x).square().mean().backward()
    check_pass(opt, of_dropout(model, opt, x))
    opt.step()


@pytest.mark.parametrize(
    ("arguments", "message"), [((None, len), "opt must be a flatmin.SAM"), ((make()[1], 3), "closure must be")]
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        check_pass(*arguments)
