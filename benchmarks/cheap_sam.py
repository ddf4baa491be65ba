"""What the ways to make SAM cheaper cost in time: steps of WRN-16-2 on 32 x 32 images, batch 128, over SGD's.

Passes count examples. A small pass uses the machine badly, so that the time of a part is above its passes: the second
table says from which batch size on the passes tell the truth. The memory beyond SAM's is that of the copy of the
gradients which every weight but 1 needs, in units of the parameters' size.
"""

import copy
import itertools

import torch
import torch.nn.functional as F

from benchmarks.harness import interleaved, peak_bytes, ratio, table
from flatmin import SAM
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.experiment import Model

LIMITS = {"part 1/16": 1.18, "part 1/8": 1.25, "part 1/4": 1.35, "every 4": 1.30, "momentum": 1.05}
PASSES = {"SGD": 1.0, "SAM": 2.0, "part 1/16": 1.0625, "part 1/8": 1.125, "part 1/4": 1.25, "every 4": 1.25}
PASSES |= {"momentum": 1.0}
SETTINGS = {"every 4": {"weight": 4.0}, "momentum": {"direction": "momentum"}}
PARTS = {"part 1/16": 1 / 16, "part 1/8": 1 / 8, "part 1/4": 1 / 4}


def steps(network, x, y, names):
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


def by_batch_size() -> None:
    print("\nTime of a part of 1/8 (1.125 passes) over SGD's, by batch size:\n")
    rows = []
    for name, pixels in (("wrn-16-2", 32), ("vit-4-64-2", 14)):
        network = build_model(Model(name=name), num_classes=10, in_channels=3)
        for batch_size in (16, 32, 64, 128):
            methods, _ = steps(network, *batch_of(batch_size, pixels), ("SGD", "part 1/8"))
            middle, low, high = ratio(interleaved(methods, rounds=5, warm_up=1), "part 1/8", "SGD")
            rows.append([f"{name}, {pixels} x {pixels}", str(batch_size), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
    print(table(["model", "batch", "time over SGD's", "quartiles"], rows))
    print()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build_model(Model(name="wrn-16-2"), num_classes=10, in_channels=3)
    size = sum(p.numel() * p.element_size() for p in network.parameters())
    methods, peaks = steps(network, *batch_of(128), PASSES)
    seconds = interleaved(methods, rounds=7, warm_up=1)
    print("## Cheap SAM: time of a step over SGD's (WRN-16-2, 32 x 32, batch 128, float32, one thread)\n")
    rows = []
    for name, passes in PASSES.items():
        middle, low, high = ratio(seconds, name, "SGD")
        limit = f"{LIMITS[name]:.2f}" if name in LIMITS else ""
        extra = f"{(peaks[name] - peaks['SGD']) / size:.2f}"
        rows.append([name, f"{passes:g}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", limit, extra])
    print(
        table(["method", "passes", "time over SGD's", "quartiles", "at most", "memory over SGD's, x parameters"], rows)
    )
    by_batch_size()


if __name__ == "__main__":
    main()
