"""What each of four processes does in tests/core/test_mesh.py, in a mesh of 2 x 2."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatmin import SAM
from fsdp_cases import STEPS, batch, generator_for, loss_of, weights, whole


def make_model():
    torch.manual_seed(0)
    # An even hidden width, as tensor parallelism needs it; the last layer has one row, so that some shards are empty.
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def parallel_model(kind):
    """Return the model, and which of its batches a rank sees."""
    model = make_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":  # replicas over the outer dimension, shards over the inner one; all ranks see other examples
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), lambda rank: rank
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["inner"], plan)
    return fully_shard(model, mesh=mesh["outer"]), lambda rank: rank // 2


def train(rank, kind, settings, way="closure"):
    model, data_of = parallel_model(kind)
    opt = SAM(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model, **settings, **generator_for(settings)
    )
    for step in range(STEPS):

        def closure():
            opt.zero_grad()
            loss = loss_of(model, batch(data_of(rank), step))
            loss.backward()
            return loss

        if way == "closure":
            opt.step(closure)
        else:
            closure()
            with opt.perturbed():
                closure()
            opt.step()
    return weights(model), opt.metrics.perturbation_norm, opt.metrics.grad_norm


def placements(rank, p):
    """Parameters placed in every way on the mesh, with given gradients; return what each moved by."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    generator = torch.Generator().manual_seed(1)
    ways = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Shard(0), Shard(0)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(0), Replicate()]),
        (mesh, [Replicate(), Replicate()]),
        (mesh["inner"], [Shard(0)]),
        (mesh["outer"], [Shard(1)]),
        None,
    ]
    values = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in ways]
    grads = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in ways]
    params = []
    for value, grad, way in zip(values, grads, ways, strict=True):
        param = nn.Parameter(value.clone() if way is None else distribute_tensor(value.clone(), *way))
        param.grad = grad.clone() if way is None else distribute_tensor(grad.clone(), *way)
        params.append(param)
    opt = SAM(torch.optim.SGD(params, lr=0.1), rho=0.3, p=p)
    with opt.perturbed():
        moved = [whole(param.detach()) - value for param, value in zip(params, values, strict=True)]
    return moved, grads
