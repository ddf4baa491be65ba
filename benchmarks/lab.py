"""The lab's costs, as ratios within one run: its step against a loop written by hand, SAM against SGD, its input.

A WRN-16-2 on images of CIFAR's size, batch 128, bfloat16 where the machine has it. Limits: the engine's SGD step
at most 1.05 times the loop by hand, its SAM step at most 2.05 times its SGD step, its input with basic augmentation at
most 5 % of an SGD step and with AutoAugment at most 25 %.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.harness import interleaved, ratio, table
from flatmin.lab.data.images import MemoryImages
from flatmin.lab.data.pipeline import Pipeline
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.datasets import dataset_info
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.precision import autocast, resolve_precision
from flatmin.lab.training.steps import Stepper

ROUNDS = 15
BATCH = 128
CPU = torch.device("cpu")


def a_model():
    torch.manual_seed(0)
    return build_model(Model(name="wrn-16-2"), num_classes=10).to(memory_format=torch.channels_last).train()


def a_stepper(**optim):
    experiment = Experiment(data=Data(name="cifar10", batch_size=BATCH), optim=Optim(**optim))
    return Stepper(experiment, a_model(), 0, Workers(device=CPU))


def endless_batches(augment):
    """Batches of noise: what the images show does not change what they cost."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20 * BATCH, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = MemoryImages(pixels=pixels, labels=np.arange(20 * BATCH) % 10)
    info = dataset_info("cifar10")
    data = Data(name="cifar10", batch_size=BATCH, augment=augment)
    pipeline = Pipeline(data=data, info=info, mean=info.mean, std=info.std, seed=0, device=CPU)
    return itertools.chain.from_iterable(pipeline.training(images, epoch) for epoch in itertools.count())


def hand_written_step(batch):
    model = a_model()
    precision = resolve_precision("auto", CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step():
        optimizer.zero_grad()
        with autocast(precision, CPU):
            logits = model(batch.inputs)
        loss = F.cross_entropy(logits.float(), batch.labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main():
    """Print the table."""
    basic, auto = endless_batches("basic"), endless_batches("autoaugment")
    batch = next(basic)
    sgd, sam = a_stepper(), a_stepper(rho=0.05)
    steps = itertools.count()
    methods = {
        "hand-written SGD step": hand_written_step(batch),
        "engine's SGD step": lambda: sgd.step(batch, next(steps), 0.1).at_w.loss.item(),
        "engine's SAM step": lambda: sam.step(batch, next(steps), 0.1).at_w.loss.item(),
        "input, basic": lambda: next(basic),
        "input, AutoAugment + Cutout": lambda: next(auto),
    }
    seconds = interleaved(methods, ROUNDS)
    comparisons = [
        ("engine's SGD step", "hand-written SGD step", 1.05),
        ("engine's SAM step", "engine's SGD step", 2.05),
        ("input, basic", "engine's SGD step", 0.05),
        ("input, AutoAugment + Cutout", "engine's SGD step", 0.25),
    ]
    rows = []
    for name, reference, limit in comparisons:
        middle, low, high = ratio(seconds, name, reference)
        verdict = "yes" if middle <= limit else "NO"
        rows.append([name, reference, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{limit:g}", verdict])
    print(f"\n## The lab\n\nWRN-16-2, batch {BATCH}, {resolve_precision('auto', CPU)}, medians of {ROUNDS} rounds")
    print(table(["what", "over", "ratio", "quartiles", "at most", "met"], rows))


if __name__ == "__main__":
    main()
