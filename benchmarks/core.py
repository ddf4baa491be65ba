"""What a SAM step costs in addition to its two passes: flatmin, its peers, and the lower bound.

The lower bound is two forward-backward passes and one step of the base optimizer (SGD with momentum). Time is
the median ratio to it over the rounds, with quartiles; memory is the peak over building the optimizer and its first
step, beyond the lower bound's peak, in units of the parameters' size.
"""

import copy

import pytorch_optimizer
import torch
from torch import nn

from benchmarks.harness import interleaved, peak_bytes, ratio, resnet20, table
from flatmin import SAM


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


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("\n## A SAM step\n\nCPU time on one thread.")
    measure("ResNet-20, batch 128", resnet20(), torch.randn(128, 3, 32, 32), rounds=9)
    measure("MLP of width 32, batch 16", mlp(), torch.randn(16, 32), rounds=100)


if __name__ == "__main__":
    main()
