"""What each of four processes does in tests/core/test_fsdp.py, in a mesh of 2 x 2."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_cases
from flatmin import SAM
from flatmin.core.compat import TORCH
from fsdp_cases import RESHARD, STEPS, batch, generator_for, loss_of, weights, whole
from references import closure_of
from two_processes import recorded_collectives

# Not divisible by four, which torch 2.6 does not shard over two dimensions, and 2.8 wrongly, without flatmin too.
HIDDEN = 6 if TORCH >= (2, 13) else 8


def make_model():
    torch.manual_seed(0)
    # An even hidden width, as tensor parallelism needs it; the last layer has one row, so that some shards are empty.
    return nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()


def parallel_model(kind):
    """Return the model, and which of its batches a rank sees."""
    model = make_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":  # replicas over the outer dimension, shards over the inner one; all ranks see other examples
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, **RESHARD)
        return fully_shard(model, mesh=mesh, **RESHARD), lambda rank: rank
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["inner"], plan)
    return fully_shard(model, mesh=mesh["outer"], **RESHARD), lambda rank: rank // 2


def train(rank, kind, settings, way="closure"):
    model, data_of = parallel_model(kind)
    opt = SAM(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model, **settings, **generator_for(settings)
    )
    for step in range(STEPS):
        x, y = batch(data_of(rank), step)

        def closure_for(*rows):
            return closure_of(opt, lambda: loss_of(model, (x[slice(*rows)], y[slice(*rows)])))

        closure = closure_for(None)
        if way == "closure":
            opt.step(closure)
        elif way == "list":
            opt.step([closure_for(4), closure_for(4, 8)])
        elif way == "part":
            opt.step_batch(lambda x, y: loss_of(model, (x, y)), (x, y), part=1 / 4)
        else:
            closure()
            with opt.perturbed():
                closure()
            opt.step()
    return weights(model), opt.metrics.perturbation_norm, opt.metrics.grad_norm


def own_directions(rank, sync_perturbation):
    """Return the perturbation that a rank's replica has, from a generator that SAM makes itself."""
    model, _ = parallel_model("hsdp")
    torch.manual_seed(rank)  # as it may differ between ranks
    opt = SAM(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        direction="random",
        sync_perturbation=sync_perturbation,
    )
    before = weights(model)
    with opt.perturbed():
        return weights(model) - before


def numbers_reduced(rank, way, settings):
    """Return how many numbers one step averages over replicas, and in how many calls."""
    model, _ = parallel_model("hsdp")
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)
    x, y = batch(rank, 0)
    closure = closure_of(opt, lambda: loss_of(model, (x, y)))
    replicas = dist.get_process_group_ranks(next(model.parameters()).device_mesh.get_group(0))
    with recorded_collectives() as calls:
        opt.step([closure, closure] if way == "list" else closure)
    reduced = [(args[0].numel(), kwargs["group"]) for name, args, kwargs in calls if name == "all_reduce"]
    assert all(dist.get_process_group_ranks(group) == replicas for _, group in reduced)
    return sum(numel for numel, _ in reduced), len(reduced)


def divided_by(rank, way, factor):
    """Train with a divisor of the user's own instead of the number of ranks."""
    model, _ = parallel_model("hsdp")
    for layer in (model[0], model[2]):
        layer.set_gradient_divide_factor(factor)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, model=model)
    x, y = batch(rank, 0)
    closure = closure_of(opt, lambda: loss_of(model, (x, y)))
    opt.step([closure, closure] if way == "list" else closure)
    return weights(model)


def failing_first_pass(rank):
    """A closure raises in its first pass; return whether the next pass is averaged over replicas again."""
    model, _ = parallel_model("hsdp")
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, model=model)

    def closure():
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        opt.step(closure)
    with recorded_collectives() as calls:
        loss_of(model, batch(rank, 0)).backward()
    return sum(name == "all_reduce" for name, *_ in calls)


def placements(rank, p, bad=None):
    """Parameters placed in every way on the mesh, with given gradients; return what each moved by."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    generator = torch.Generator().manual_seed(1)
    ways = [
        None,
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
    if bad is not None:
        grads[1][0, 0] = bad  # on rank 0 only
    params = []
    for value, grad, way in zip(values, grads, ways, strict=True):
        param = nn.Parameter(value.clone() if way is None else distribute_tensor(value.clone(), *way))
        param.grad = grad.clone() if way is None else distribute_tensor(grad.clone(), *way)
        params.append(param)
    opt = SAM(torch.optim.SGD(params, lr=0.1), rho=0.3, p=p)
    with opt.perturbed():
        moved = [whole(param.detach()) - value for param, value in zip(params, values, strict=True)]
    return moved, grads


def suggestion(rank, sync):
    return fsdp_cases.suggestion(rank, {"sync_perturbation": sync}, parallel_model("hsdp")[0])
