"""What each of two processes does in tests/core/test_fsdp.py."""

import runpy
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ddp_cases import ElementwiseRoots, roots, surrogate_gap
from flatmin import SAM, suggest_rho
from flatmin.core.compat import TORCH
from references import closure_of
from two_processes import recorded_collectives

RESHARD = {}
if TORCH < (2, 7):  # FSDP2 on the CPU is broken in torch 2.6, without flatmin too
    torch.cpu.Stream.record_event = lambda self, event=None: event or object()
    torch.cpu.Stream.wait_event = lambda self, event: None
    # The second all-gather, in the backward pass, breaks autograd's version counter.
    RESHARD = {"reshard_after_forward": False}

STEPS = 3
WIDTHS = (3, 5, 1)  # odd numbers of rows: uneven shards, and empty ones for the last layer


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh(), nn.Linear(WIDTHS[1], WIDTHS[2])).to(dtype)


def batch(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def loss_of(model, data):
    return ((model(data[0]).double() - data[1].double()) ** 2).mean()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model):
    return torch.cat([whole(p.detach()).reshape(-1) for p in model.parameters()])


def sharded_model(dtype=torch.float64, **settings):
    model = make_model(dtype)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **RESHARD, **settings)
    return fully_shard(model, mesh=mesh, **RESHARD, **settings)


def generator_for(settings):
    return {"generator": torch.Generator().manual_seed(4)} if settings.get("direction") == "random" else {}


def train(rank, settings, way):
    model = sharded_model()
    opt = SAM(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model, **settings, **generator_for(settings)
    )
    for step in range(STEPS):
        closure = closure_of(opt, lambda: loss_of(model, batch(rank, step)))
        if way == "closure":
            opt.step(closure)
            continue
        if settings.get("direction") != "momentum" or not opt.needs_perturbed_pass:
            closure()
        if opt.needs_perturbed_pass:
            with opt.perturbed():
                closure()
        opt.step()
    return weights(model), opt.metrics.perturbation_norm, opt.metrics.grad_norm


def single_process(settings):
    """The same training without shards: one process on the batches of both."""
    model = make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **settings, **generator_for(settings))
    for step in range(STEPS):

        def closure():
            opt.zero_grad()
            loss = sum(loss_of(model, batch(rank, step)) for rank in range(2)) / 2
            loss.backward()
            return loss

        opt.step(closure)
    return weights(model), opt.metrics.perturbation_norm, opt.metrics.grad_norm


def collectives_of_one_perturbation(rank, settings):
    model = sharded_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)
    loss_of(model, batch(rank, 0)).backward()
    with recorded_collectives() as calls, opt.perturbed():
        pass
    return [name for name, *_ in calls]


def restored_after_an_exception(rank, dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dtype == torch.float32 else MixedPrecisionPolicy()
    model = sharded_model(dtype, mp_policy=policy)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
    before = [p.to_local().clone() for p in model.parameters()]
    loss_of(model, batch(rank, 0, dtype)).backward()
    moved = False
    try:
        with opt.perturbed():
            moved = any(
                p.to_local().numel() and not torch.equal(p.to_local(), b)
                for p, b in zip(model.parameters(), before, strict=True)
            )
            loss_of(model, batch(rank, 0, dtype)).backward()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    same = all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
    return moved, same


def checkpoint_round_trip(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def steps(model, opt, numbers):
        for step in numbers:
            opt.step(closure_of(opt, lambda: loss_of(model, batch(rank, step))))

    def make():
        model = sharded_model()
        return model, SAM(torch.optim.AdamW(model.parameters(), lr=0.01), rho=0.3, model=model)

    model, opt = make()
    steps(model, opt, range(2))
    opt.zero_grad()
    model_state, opt_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "opt": opt_state}, checkpoint_id=folder)
    other, other_opt = make()
    model_state, opt_state = get_state_dict(other, other_opt)
    state = {"model": model_state, "opt": opt_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, other_opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    steps(model, opt, range(2, 4))
    steps(other, other_opt, range(2, 4))
    return weights(model), weights(other)


def two_optimizers(model, matrices):
    make = torch.optim.Muon if matrices == "muon" else torch.optim.SGD
    first, *others = model.parameters()  # torch's Muon cannot step on a shard without rows, as the last layer has
    bases = [make([first], lr=0.05, momentum=0.9, weight_decay=0.0), torch.optim.AdamW(others, lr=0.01)]
    return SAM(bases, rho=0.3, model=model)


def step_two_optimizers(model, opt, ranks, steps):
    for step in steps:

        def closure():
            opt.zero_grad()
            loss = sum(loss_of(model, batch(rank, step)) for rank in ranks) / len(ranks)
            loss.backward()
            return loss

        opt.step(closure)


def train_two_optimizers(rank, matrices, folder):
    """Return the weights, and those of a training that went on from a distributed checkpoint before its last step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded_model()
    opt = two_optimizers(model, matrices)
    step_two_optimizers(model, opt, [rank], range(2))
    opt.zero_grad()
    model_state, opt_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "opt": opt_state}, checkpoint_id=folder)
    other = sharded_model()
    other_opt = two_optimizers(other, matrices)
    model_state, opt_state = get_state_dict(other, other_opt)
    state = {"model": model_state, "opt": opt_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, other_opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    step_two_optimizers(model, opt, [rank], [2])
    step_two_optimizers(other, other_opt, [rank], [2])
    return weights(model), weights(other)


def single_process_with_two_optimizers(matrices):
    model = make_model()
    step_two_optimizers(model, two_optimizers(model, matrices), [0, 1], range(3))
    return weights(model)


def train_on_a_part(rank):
    model = sharded_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.3)
    for step in range(STEPS):
        opt.step_batch(lambda x, y: loss_of(model, (x, y)), batch(rank, step), part=1 / 4)
    return weights(model)


def train_with_gathered_weights(rank, how):
    """Train where FSDP2 keeps weights that it gathered before SAM moved their shards."""
    model = sharded_model()
    if how == "not resharded":
        model.set_reshard_after_backward(False)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.3)
    for step in range(STEPS):
        data = batch(rank, step)
        closure = closure_of(opt, lambda: loss_of(model, data))
        closure()
        if how == "read between the passes":
            with torch.no_grad():
                model(data[0])
        with opt.perturbed():
            closure()
            if how == "read in the second pass":
                with torch.no_grad():
                    model(data[0])
        opt.step()
    model.reshard()  # what is gathered is as old as before the step, as in FSDP2 without SAM
    return weights(model)


def suggestion(rank, settings, model=None):
    # Weights that stay gathered until a backward pass do not see that their shards are perturbed.
    model = sharded_model(**({} if RESHARD else {"reshard_after_forward": False})) if model is None else model
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)
    before = weights(model)
    batches = [batch(rank, step) for step in range(2)]
    found = suggest_rho(opt, lambda x, y: loss_of(model, (x, y)), batches)
    curve = found.measure([0.2])
    assert torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())
    return [found.rho, found.loss, found.grad_norm, *curve.rises]


def errors_with_functions(rank):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = sharded_model()
    messages = []
    for function in ({"direction": roots}, {"combine": surrogate_gap}):
        try:
            SAM(torch.optim.SGD(model.parameters(), lr=0.1), **function)
        except ValueError as error:
            messages.append(str(error))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), direction=ElementwiseRoots())
    assert opt.state_dict()["param_groups"][0]["sam_direction"] == {"num_calls": 0}
    try:
        get_optimizer_state_dict(model, opt)
    except ValueError as error:
        messages.append(str(error))
    return messages


def train_example(rank, path):
    """Return the whole weights after examples/fsdp2.py, which must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = runpy.run_path(str(path))["train"]()
    return {name: t.full_tensor() for name, t in model.state_dict().items()}
