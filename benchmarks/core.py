"""What a SAM step costs in addition to its two passes: flatmin, its peers, the lower bound; and what cheaper ones cost.

The lower bound is two forward-backward passes and one step of the base optimizer (SGD with momentum). Time is
the median ratio to it over the rounds, with quartiles; memory is the peak over building the optimizer and its first
step, beyond the lower bound's peak, in units of the parameters' size.

Cheap SAM: steps of WRN-16-2 on 32 x 32 images, batch 128, over SGD's. Passes count examples. A small pass uses the
machine badly, and the time of a part is above its passes: the last table says from which batch size on the passes tell
the truth. The memory beyond SAM's is that of the copy of the gradients which every weight but 1 needs.
"""

import copy
import itertools

import pytorch_optimizer
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import interleaved, peak_bytes, ratio, resnet20, table
from flatmin import SAM
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.experiment import Model


def mlp():
    """400 parameter tensors, most of them small."""
    return nn.Sequential(*(layer for _ in range(200) for layer in (nn.Linear(32, 32), nn.ReLU())))


class LoopSAM:
    """The arithmetic of the most used implementation: a loop over tensors, a norm each, a clone of every weight."""

    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho

    def step(self, closure):
        closure()
        with torch.no_grad():
            size = torch.norm(torch.stack([p.grad.norm(p=2) for p in self.params]), p=2)
            scale = self.rho / (size + 1e-12)
            old = {}
            for p in self.params:
                old[p] = p.data.clone()
                p.add_(p.grad * scale)
        closure()
        with torch.no_grad():
            for p in self.params:
                p.data = old[p]
        self.base.step()


class BareForeach:
    """The fewest foreach calls that do the same: no guard, no batch norm, no noise, nothing restored on errors."""

    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho

    def step(self, closure):
        closure()
        with torch.no_grad():
            grads = [p.grad for p in self.params]
            size = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            old = torch._foreach_add(self.params, 0)
            torch._foreach_add_(self.params, torch._foreach_mul(grads, self.rho / size))
        closure()
        with torch.no_grad():
            torch._foreach_copy_(self.params, old)
        self.base.step()


def methods(model, x):
    """Return a step of each method, and the peak memory of building it and taking its first step."""
    settings = {"lr": 1e-3, "momentum": 0.9}
    steps, peaks = {}, {}

    def add(name, make_step):
        own = copy.deepcopy(model)

        def closure():
            own.zero_grad()
            loss = own(x).square().mean()
            loss.backward()
            return loss

        def build_and_step():
            steps[name] = make_step(own, closure)
            steps[name]()

        peaks[name] = peak_bytes(build_and_step)

    def limit(own, closure):
        base = torch.optim.SGD(own.parameters(), **settings)

        def step():
            closure()
            closure()
            base.step()

        return step

    def flatmin(own, closure):
        opt = SAM(torch.optim.SGD(own.parameters(), **settings), rho=0.05, model=own)
        return lambda: opt.step(closure)

    def peer(cls):
        def make(own, closure):
            opt = cls(own.parameters(), torch.optim.SGD(own.parameters(), **settings), rho=0.05)
            return lambda: opt.step(closure)

        return make

    def published(foreach):
        def make(own, closure):
            opt = pytorch_optimizer.SAM(own.parameters(), torch.optim.SGD, rho=0.05, foreach=foreach, **settings)

            def step():
                closure()
                opt.step(closure)

            return step

        return make

    add("lower bound: two passes + base step", limit)
    add("flatmin.SAM", flatmin)
    add("davda54's arithmetic", peer(LoopSAM))
    add("pytorch_optimizer.SAM, loop", published(False))
    add("pytorch_optimizer.SAM, foreach", published(True))
    add("bare foreach calls", peer(BareForeach))
    return steps, peaks


def measure(title, model, x, rounds):
    steps, peaks = methods(model, x)
    reference = next(iter(steps))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    seconds = interleaved(steps, rounds)
    rows = []
    for name in steps:
        middle, low, high = ratio(seconds, name, reference)
        extra = (peaks[name] - peaks[reference]) / size
        rows.append([name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{extra:.2f}"])
    count = len(list(model.parameters()))
    print(f"\n### {title}: {count} tensors, {size / 4 / 1e3:,.0f} k parameters, {rounds} rounds\n")
    print(table(["method", "time / lower bound", "quartiles", "extra memory / parameters"], rows))


# Cheap SAM.

LIMITS = {"part 1/16": 1.18, "part 1/8": 1.25, "part 1/4": 1.35, "every 4": 1.30, "momentum": 1.05}
PASSES = {"SGD": 1.0, "SAM": 2.0, "part 1/16": 1.0625, "part 1/8": 1.125, "part 1/4": 1.25, "every 4": 1.25}
PASSES |= {"momentum": 1.0}
SETTINGS = {"every 4": {"weight": 4.0}, "momentum": {"direction": "momentum"}}
PARTS = {"part 1/16": 1 / 16, "part 1/8": 1 / 8, "part 1/4": 1 / 4}


def cheap_steps(network, x, y, names):
    """Return four steps of each method on a batch, so that every fourth one is in it, and each one's peak memory."""
    found, peaks = {}, {}
    for name in names:
        model = copy.deepcopy(network)
        base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def loss_fn(x, y, model=model):
            return F.cross_entropy(model(x), y)

        if name == "SGD":

            def step(base=base, loss_fn=loss_fn):
                base.zero_grad()
                loss_fn(x, y).backward()
                base.step()
        else:
            opt, part = SAM(base, rho=0.05, model=model, **SETTINGS.get(name, {})), PARTS.get(name, 1.0)

            rhos = itertools.cycle([0.05, 0.0, 0.0, 0.0] if name == "every 4" else [0.05])

            def step(opt=opt, loss_fn=loss_fn, part=part, rhos=rhos):
                opt.rho = next(rhos)
                opt.step_batch(loss_fn, (x, y), part=part)

        peaks[name] = peak_bytes(step)
        step()

        def four(step=step):
            for _ in range(4):
                step()

        found[name] = four
    return found, peaks


def batch_of(size, pixels=32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, pixels, pixels, generator=generator), torch.randint(10, (size,), generator=generator)


def measure_batch_sizes() -> None:
    print("\nTime of a part of 1/8 (1.125 passes) over SGD's, by batch size:\n")
    rows = []
    for name, pixels in (("wrn-16-2", 32), ("vit-4-64-2", 14)):
        network = build_model(Model(name=name), num_classes=10, in_channels=3)
        for batch_size in (16, 32, 64, 128):
            methods, _ = cheap_steps(network, *batch_of(batch_size, pixels), ("SGD", "part 1/8"))
            middle, low, high = ratio(interleaved(methods, rounds=5, warm_up=1), "part 1/8", "SGD")
            rows.append([f"{name}, {pixels} x {pixels}", str(batch_size), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
    print(table(["model", "batch", "time over SGD's", "quartiles"], rows))
    print()


def measure_cheap_sam() -> None:
    network = build_model(Model(name="wrn-16-2"), num_classes=10, in_channels=3)
    size = sum(p.numel() * p.element_size() for p in network.parameters())
    methods, peaks = cheap_steps(network, *batch_of(128), PASSES)
    seconds = interleaved(methods, rounds=7, warm_up=1)
    print("\n## Cheap SAM: time of a step over SGD's (WRN-16-2, 32 x 32, batch 128, float32, one thread)\n")
    rows = []
    for name, passes in PASSES.items():
        middle, low, high = ratio(seconds, name, "SGD")
        limit = f"{LIMITS[name]:.2f}" if name in LIMITS else ""
        extra = f"{(peaks[name] - peaks['SGD']) / size:.2f}"
        rows.append([name, f"{passes:g}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", limit, extra])
    print(
        table(["method", "passes", "time over SGD's", "quartiles", "at most", "memory over SGD's, x parameters"], rows)
    )
    measure_batch_sizes()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("\n## A SAM step\n\nCPU time on one thread.")
    measure("ResNet-20, batch 128", resnet20(), torch.randn(128, 3, 32, 32), rounds=9)
    measure("MLP of width 32, batch 16", mlp(), torch.randn(16, 32), rounds=100)
    measure_cheap_sam()


if __name__ == "__main__":
    main()
