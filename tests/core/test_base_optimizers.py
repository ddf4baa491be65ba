"""Every optimizer of torch.optim that steps on given gradients is a base that steps as by itself; releases of torch."""

import inspect

import pytest
import torch
from torch import nn

from flatmin import SAM, sam_gradient
from flatmin.core import compat
from references import closure_of

NEEDS_A_CLOSURE = {"LBFGS"}
SETTINGS = {"SGD": {"lr": 0.05, "momentum": 0.9}, "Muon": {"lr": 0.05}}


def optimizers():
    for name, cls in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
            continue
        if name in NEEDS_A_CLOSURE:
            continue
        flags = [{}]
        parameters = inspect.signature(cls).parameters
        flags += [{flag: True} for flag in ("foreach", "fused") if flag in parameters]
        if "foreach" in parameters:
            flags.append({"foreach": False})
        for flag in flags:
            yield pytest.param(cls, flag, id=f"{name}-{''.join(f'{k}={v}' for k, v in flag.items())}")


def build(cls, flags, params):
    return cls(params, **SETTINGS.get(cls.__name__, {"lr": 0.01}), **flags)


@pytest.mark.parametrize(("cls", "flags"), list(optimizers()))
def test_a_step_is_the_bases_own_step_on_the_sam_gradient(cls, flags):
    sparse = cls is torch.optim.SparseAdam
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(3, 3)]
    index = torch.tensor([0, 2, 2])

    def loss_of(params):
        rows = nn.functional.embedding(index, params[0], sparse=sparse)
        if sparse:
            return (torch.tanh(rows) ** 2).sum()
        return (torch.tanh(rows @ params[1]) ** 2).sum()

    count = 1 if sparse else 2
    sam_params = [nn.Parameter(t.clone()) for t in start[:count]]
    own_params = [nn.Parameter(t.clone()) for t in start[:count]]
    opt = SAM(build(cls, flags, sam_params), rho=0.2)
    own = build(cls, flags, own_params)

    for _ in range(3):
        opt.step(closure_of(opt, lambda: loss_of(sam_params)))
        result = sam_gradient(loss_of, own_params, rho=0.2)
        for p, g in zip(own_params, result.grads, strict=True):
            p.grad = g.to_sparse(1) if sparse else g
        own.step()
        for a, b in zip(sam_params, own_params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert not torch.equal(sam_params[0], start[0])


def test_the_list_above_is_not_empty_and_covers_the_well_known():
    names = {parameter.id.split("-")[0] for parameter in optimizers()}
    assert {"SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "RMSprop", "NAdam", "RAdam", "Rprop", "ASGD"} <= names


def test_an_optimizer_of_somebody_elses_works():
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad.sign()

    w = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = SAM(SignDescent([w], lr=0.5), rho=0.1)
    opt.step(closure_of(opt, lambda: (w**2).sum()))
    assert w.tolist() == [0.5, -1.5]


def test_adadeltas_own_rho_is_left_alone():
    opt = SAM(torch.optim.Adadelta([nn.Parameter(torch.ones(2))], rho=0.77), rho=0.2)
    assert opt.param_groups[0]["rho"] == 0.77
    assert opt.rho == 0.2


# What differs between releases of torch behaves alike on all of them.

each_release = pytest.mark.parametrize("torch_version", [compat.TORCH, (2, 6)])


@each_release
def test_hooks_on_saved_tensors_are_seen_while_they_are_active(torch_version, monkeypatch):
    monkeypatch.setattr(compat, "TORCH", torch_version)
    for _ in range(2):  # asking does not disable them
        assert not compat.has_saved_tensors_hooks()
        with torch.autograd.graph.save_on_cpu():
            assert compat.has_saved_tensors_hooks()


@each_release
def test_asking_for_hooks_leaves_disabled_ones_disabled(torch_version, monkeypatch):
    monkeypatch.setattr(compat, "TORCH", torch_version)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not compat.has_saved_tensors_hooks()
        with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.save_on_cpu():
            pass
