"""What each of two DDP workers does in tests/core/test_ddp.py."""

import runpy
import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from flatmin import SAM, suggest_rho
from flatmin.integrations.deferred_step import DeferredSAM, RhoSearch
from references import closure_of
from two_processes import recorded_collectives

STEPS = 3
SIZES = [5, 3]  # of the micro-batches of each worker


def make_model(layer=None, unused=False):
    torch.manual_seed(0)
    return Net(layer, unused).double()


class Memory(nn.Module):
    """Adds a buffer to its input, and then moves the buffer to the input's mean: it enters the forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("vector", torch.zeros(4))

    def forward(self, x):
        out = x + self.vector.clone()
        self.vector.add_(x.detach().mean(0))
        return out


class Net(nn.Module):
    def __init__(self, layer, unused):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = {"batch norm": lambda: nn.BatchNorm1d(4), "memory": Memory, None: nn.Identity}[layer]()
        self.last = nn.Linear(4, 1)
        self.extra = nn.Linear(4, 1) if unused else None
        self.never = nn.Linear(4, 1) if unused else None

    def forward(self, x, use_extra=False):
        hidden = torch.tanh(self.norm(self.first(x)))
        out = self.last(hidden)
        return out + self.extra(hidden) if use_extra and self.extra is not None else out


def micro_batches(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    n = sum(SIZES)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def whole_batch(rank, step):
    xs, ys = zip(*micro_batches(rank, step), strict=True)
    return torch.cat(xs), torch.cat(ys)


def loss_of(model, batch, use_extra=False):
    return ((model(batch[0], use_extra) - batch[1]) ** 2).mean()


def train(rank, way, settings, ddp_settings, layer, unused):
    """Train some steps; return weights, buffers of each step, and how often gradients were reduced."""
    ddp = DistributedDataParallel(make_model(layer, unused), **ddp_settings)
    ddp.register_comm_hook(None, allreduce_hook)  # which calls dist.all_reduce, where it can be counted
    opt = SAM(torch.optim.SGD(ddp.parameters(), lr=0.1), rho=0.3, model=ddp, **settings)
    buffers = []
    with recorded_collectives() as calls:
        for step in range(STEPS):

            def closure_for(batch):
                return closure_of(opt, lambda: loss_of(ddp, batch, use_extra=unused and rank == 0))

            if way == "closure":
                opt.step(closure_for(whole_batch(rank, step)))
            elif way == "list":
                opt.step([closure_for(b) for b in micro_batches(rank, step)], weights=SIZES)
            elif way == "rest":  # the first micro-batch is corrected, the second is the rest
                first, rest = micro_batches(rank, step)
                opt.step(closure_for(first), rest=closure_for(rest), weights=SIZES)
            elif way == "perturbed":
                with nullcontext() if settings["sync_perturbation"] else ddp.no_sync():
                    closure_for(whole_batch(rank, step))()
                with opt.perturbed():
                    closure_for(whole_batch(rank, step))()
                opt.step()
            buffers.append({name: b.clone() for name, b in ddp.module.named_buffers()})
    reduced = [args[0] for name, args, _ in calls if name == "all_reduce"]
    return {
        "weights": torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]),
        "buffers": buffers,
        "reductions": [tensor.numel() for tensor in reduced if tensor.is_floating_point()],
        "no_gradient": [name for name, p in ddp.module.named_parameters() if p.grad is None],
    }


def warn_without_the_wrapper(rank):
    model = make_model()
    ddp = DistributedDataParallel(model)
    found = []
    for given in (None, model, ddp):
        opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=given)
        closure = closure_of(opt, lambda: loss_of(ddp, whole_batch(rank, 0)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step(closure)
            opt.step(closure)
        found.append([str(w.message) for w in caught if "several workers" in str(w.message)])
    return found


def random_directions(rank, sync):
    torch.manual_seed(7)
    model = make_model()
    ddp = DistributedDataParallel(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.0), direction="random", model=ddp, sync_perturbation=sync)
    seen = []

    def loss():
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        return loss_of(ddp, whole_batch(rank, 0))

    opt.step(closure_of(opt, loss))
    return seen[0]


def mixed_two_pass_form(rank):
    ddp = DistributedDataParallel(make_model())
    opt = SAM(torch.optim.SGD(ddp.parameters(), lr=0.1), weight=2.0, model=ddp)
    with ddp.no_sync():
        loss_of(ddp, whole_batch(rank, 0)).backward()
    try:
        with opt.perturbed():
            pass
    except ValueError as error:
        return str(error)
    return ""


def rest_that_drops_gradients(rank):
    ddp = DistributedDataParallel(make_model())
    opt = SAM(torch.optim.SGD(ddp.parameters(), lr=0.1), model=ddp)
    closure = closure_of(ddp, lambda: loss_of(ddp, whole_batch(rank, 0)))
    try:
        opt.step(closure, rest=closure, weights=[1, 1])
    except ValueError as error:
        return str(error)
    return ""


def suggestion(rank, sync, ddp_settings):
    """Return what suggest_rho finds, and whether it left gradients, buffers and DDP as they were."""
    ddp = DistributedDataParallel(make_model(), **ddp_settings)
    ddp.module.register_buffer("own", torch.tensor(float(rank)))  # which DDP would share
    opt = SAM(torch.optim.SGD(ddp.parameters(), lr=0.1), model=ddp, sync_perturbation=sync)
    for _ in range(2):  # DDP makes its buckets anew after the first pass
        loss_of(ddp, whole_batch(rank, 9)).backward()

    def state():
        grads = [(id(p.grad), p.grad.tolist()) for p in ddp.parameters()]
        return grads, ddp.module.own.item(), ddp.require_forward_param_sync, ddp.require_backward_grad_sync

    before = state()
    found = suggest_rho(opt, lambda x, y: loss_of(ddp, (x, y)), [whole_batch(rank, step) for step in range(3)])
    curve = found.measure([0.2])
    return [found.rho, found.loss, found.grad_norm, *curve.rises], state() == before


# Functions for `direction` and `combine`.


def roots(grads):
    return [g.sign() * g.abs().sqrt() for g in grads]


def surrogate_gap(grads, perturbed, alpha=0.4):
    along = sum((g * q).sum() for g, q in zip(grads, perturbed, strict=True))
    along = along / sum((q * q).sum() for q in perturbed)
    return [q - alpha * (g - along * q) for g, q in zip(grads, perturbed, strict=True)]


class ElementwiseRoots:
    elementwise = True

    def __init__(self):
        self.num_calls = 0

    def __call__(self, grads):
        self.num_calls += 1
        return roots(grads)

    def state_dict(self):
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state):
        self.num_calls = state["num_calls"]


class ElementwiseMinimum:
    """Of both gradients, the one with the smaller absolute value."""

    elementwise = True

    def __call__(self, grads, perturbed):
        return [torch.where(g.abs() < q.abs(), g, q) for g, q in zip(grads, perturbed, strict=True)]


def train_example(rank, path):
    """Return the weights after each way of examples/ddp.py, which must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train = runpy.run_path(str(path))["train"]
        models = [train("closure"), train("perturbed"), train("closure", sync_perturbation=True)]
    return [model.state_dict() for model in models]


def search_with_an_overflow(rank):
    """Search the radius of a trainer under DDP, with gradients that overflow on rank 0 alone in the first step."""
    ddp = DistributedDataParallel(make_model())
    opt = DeferredSAM(torch.optim.SGD(ddp.parameters(), lr=0.1), rho=0.0, model=ddp)
    scaler, search, found = torch.amp.GradScaler("cpu", init_scale=8.0), RhoSearch(opt), []
    for step in range(3):

        def run(step=step):
            opt.zero_grad()
            overflow = torch.inf if (rank, step) == (0, 0) else 1.0
            loss = loss_of(ddp, whole_batch(rank, 0))
            scaler.scale(overflow * loss).backward()
            return loss

        search.measure(run, scaler)
        found.append((opt.rho, search._num_left))
        run()  # the training step's own pass
    return found
