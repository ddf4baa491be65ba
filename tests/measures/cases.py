"""Models with a known answer, slow references, and a picture of all that a measure must leave alone."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from flatmin.measures import (
    GGNOperator,
    HessianOperator,
    average_sharpness,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    spectral_density,
    top_eigenvalues,
)
from references import gauss_newton


class Quadratic(nn.Module):
    """Example i has the loss w.A_i w / 2 + b_i.w, with w in two tensors: a norm of each would show."""

    def __init__(self, w):
        super().__init__()
        half = len(w) // 2
        self.first = nn.Parameter(w[:half].clone())
        self.second = nn.Parameter(w[half:].clone().reshape(1, -1))

    def forward(self, A, b):
        w = torch.cat([self.first, self.second.flatten()])
        return torch.einsum("i,nij,j->n", w, A, w) / 2 + b @ w


class Exponential(nn.Module):
    """Overflows for large weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight.exp()


def mean_output(outputs, targets):
    return outputs.mean()


def quadratic(dim=6, num=10, batch_sizes=(4, 4, 2), seed=0):
    """Return a model, its data in ragged batches, and A, b, w of the whole."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(num, dim, dim, generator=generator, dtype=torch.float64)
    A = A + A.mT
    b = torch.randn(num, dim, generator=generator, dtype=torch.float64)
    w = torch.randn(dim, generator=generator, dtype=torch.float64)
    parts = zip(A.split(batch_sizes), b.split(batch_sizes), strict=True)
    data = [((part_A, part_b), torch.zeros(len(part_A))) for part_A, part_b in parts]
    return Quadratic(w), data, A, b, w


def diagonal(values, w=None):
    """Return a model and data whose Hessian is diagonal, with these values."""
    values = torch.as_tensor(values, dtype=torch.float64)
    w = torch.ones_like(values) if w is None else w
    return Quadratic(w), [
        ((torch.diag(values)[None], torch.zeros(1, len(values), dtype=torch.float64)), torch.zeros(1))
    ]


def tanh_network(seed=0, dtype=torch.float64):
    """Return a network of 4 * 6 + 6 + 6 * 5 + 5 = 65 weights and its loss and data, in ragged batches."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).to(dtype)
    x, y = torch.randn(20, 4, dtype=dtype), torch.randint(5, (20,))
    data = list(zip(x.split((8, 8, 4)), y.split((8, 8, 4)), strict=True))
    return model, nn.CrossEntropyLoss(), data


def whole(data):
    """Return all examples as one batch."""
    inputs, targets = zip(*data, strict=True)
    if isinstance(inputs[0], tuple):
        return [(tuple(map(torch.cat, zip(*inputs, strict=True))), torch.cat(targets))]
    return [(torch.cat(inputs), torch.cat(targets))]


def flat_outputs(model, data, names=None):
    """Return the outputs on all data as a function of one flat vector, the vector, and the targets."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    names = list(params) if names is None else names
    shapes = [params[name].shape for name in names]
    sizes = [params[name].numel() for name in names]
    ((inputs, targets),) = whole(data)
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def outputs(vector):
        parts = [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
        return functional_call(model, params | dict(zip(names, parts, strict=True)), args)

    return outputs, torch.cat([params[name].flatten() for name in names]), targets


def flat_loss(model, loss_fn, data, names=None):
    """Return the loss on all data as a function of one flat vector, and the vector."""
    outputs, vector, targets = flat_outputs(model, data, names)
    return lambda w: loss_fn(outputs(w), targets), vector


def dense_ggn(model, loss_fn, data, names=None):
    """Return the Gauss-Newton matrix."""
    outputs, vector, targets = flat_outputs(model, data, names)
    return gauss_newton(outputs, lambda z: loss_fn(z, targets), vector)


def dense_hessian(model, loss_fn, data, names=None):
    """Return the Hessian as a matrix, one second derivative at a time."""
    loss, vector = flat_loss(model, loss_fn, data, names)
    return torch.autograd.functional.hessian(loss, vector)


def everything(model):
    """Return all that a measure must leave as it was, to be compared bit for bit."""
    tensors = {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    identities = [id(t) for t in [*model.parameters(), *model.buffers()]]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    rng = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    return tensors, identities, grads, modes, flags, rng


def assert_untouched(model, before):
    tensors, identities, grads, modes, flags, rng = before
    now = everything(model)
    assert tensors.keys() == now[0].keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, now[0][name]), name
        assert tensor.dtype == now[0][name].dtype
    assert identities == now[1]
    for a, b in zip(grads, now[2], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert (modes, flags) == (now[3], now[4])
    assert torch.equal(rng[0], now[5][0])
    assert rng[1] == now[5][1]
    assert np.array_equal(rng[2], now[5][2])


def measured(data, group, cache=None):
    """Every measure of one network, as arrays."""
    model, loss_fn, _ = tanh_network()
    op = HessianOperator(model, loss_fn, data, group=group)
    found = {
        "product": (op @ torch.arange(65, dtype=torch.float64)).numpy(),
        "gauss-newton": GGNOperator(model, loss_fn, data, group=group).trace(probes=3),
        "top": top_eigenvalues(op, k=3, tol=1e-8).values,
        "trace": op.trace(probes=3),
        "density": spectral_density(op, steps=10).nodes,
        "sharpness of all": m_sharpness(model, loss_fn, data, group=group, steps=2).mean,
        "average sharpness": average_sharpness(model, loss_fn, data, rho=0.5, num_draws=2, group=group).per_draw,
        "error": m_sharpness(model, loss_fn, data, group=group, rho=1.0, metric="error").mean,
        "bound": pac_bayes_bound(model, loss_fn, data, group=group, rho=0.1, metric="error").total,
        "landscape": loss_landscape(model, loss_fn, data, group=group, dims=1, points=3, cache=cache).loss,
    }
    some = m_sharpness(model, loss_fn, data, group=group, m=4)
    found |= {"per subset": some.per_subset, "mean": some.mean, "error of the mean": some.standard_error}
    return found


def measured_on_a_shard(rank, cache):
    """Return what a rank measures with another, once and again, and by itself, and what it raises on bad data."""
    group = dist.group.WORLD
    model, loss_fn, data = tanh_network()
    ((x, y),) = whole(data)
    # Three batches here, one there.
    data = [(x[12:], y[12:])] if rank == 1 else list(zip(x[:12].split(5), y[:12].split(5), strict=True))
    found, again = (measured(data, group, cache) for _ in range(2))
    errors = []
    for bad, m in (
        ([(x, y[:3])] if rank == 1 else data, 2),
        ([], 2),
        ([(x * torch.inf, y)] if rank == 1 else data, 2),
        (data, 9),
    ):
        try:
            m_sharpness(model, loss_fn, bad, m=m, group=group)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return found, again, m_sharpness(model, loss_fn, data).mean, errors
