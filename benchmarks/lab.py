"""The lab's costs, as ratios within one run: its step against a loop written by hand, SAM against SGD, its input.

A WRN-16-2 on images of CIFAR's size, batch 128, bfloat16 where the machine has it. Limits: the engine's SGD step
at most 1.05 times the loop by hand, its SAM step at most 2.05 times its SGD step, its input with basic augmentation at
most 5 % of an SGD step and with AutoAugment at most 25 %.

With a GPU, a thread prepares the next batch while the model works on this one. On the host it fetches the images,
draws what is random, copies both in one piece, and launches kernels. If the GPU takes a step in 1 / SPEED of a core's
time, the host is busy for SPEED * (host + kernels * LAUNCH_SECONDS) / step of it: up to 1 the input keeps up. What the
GPU computes of the input becomes as much faster as the step: its share remains (input - host) / step.
"""

import itertools
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import interleaved, ratio, table
from flatmin.lab.data import augment
from flatmin.lab.data.augment import Draw
from flatmin.lab.data.autoaugment import draw_operations
from flatmin.lab.data.images import MemoryImages
from flatmin.lab.data.pipeline import Pipeline
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.datasets import dataset_info
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.evaluation import autocast, resolve_precision
from flatmin.lab.training.steps import Stepper

ROUNDS = 15
BATCH = 128
SPEED = 100  # of a GPU, compared with one core
LAUNCH_SECONDS = 5e-6
CPU = torch.device("cpu")


def a_model():
    torch.manual_seed(0)
    return build_model(Model(name="wrn-16-2"), num_classes=10).to(memory_format=torch.channels_last).train()


def a_stepper(**optim):
    experiment = Experiment(data=Data(name="cifar10", batch_size=BATCH), optim=Optim(**optim))
    return Stepper(experiment, a_model(), 0, Workers(device=CPU))


def noise_images(kind, device):
    """Images of noise, and their pipeline: what the images show does not change what they cost."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20 * BATCH, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = MemoryImages(pixels=pixels, labels=np.arange(20 * BATCH) % 10)
    info = dataset_info("cifar10")
    data = Data(name="cifar10", batch_size=BATCH, augment=kind)
    return images, Pipeline(data=data, info=info, mean=info.mean, std=info.std, seed=0, device=device)


def endless_batches(kind):
    """Yield batches for the CPU."""
    images, pipeline = noise_images(kind, CPU)
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


def host_part(kind):
    """Return what the host does for a batch where images are augmented on a device."""
    images, pipeline = noise_images(kind, torch.device("meta"))
    examples, epochs = np.arange(BATCH), itertools.count()
    labels = torch.from_numpy(images.labels[examples])

    def prepare():
        draw = Draw(seed=0, epoch=next(epochs), examples=examples)
        tensors = [images.fetch(draw, augment=True), labels, labels, augment.draw_crops(draw)]
        if kind == "autoaugment":
            tensors += [augment.draw_cutouts(draw, 32, 32), draw_operations(draw, "cifar10", torch.Size((32, 32)))[1]]
        augment.copy_together(tensors, torch.device("meta"))

    with Kernels() as kernels:
        pipeline._training_batch(images, 0, 0, examples)
    return prepare, kernels.count


class Kernels(TorchDispatchMode):
    """Counts the operations on a device ("meta" stands for it) that compute something."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        is_there = isinstance(result, torch.Tensor) and result.device.type == "meta"
        self.count += is_there and not function.is_view
        return result


def main():
    """Print the table."""
    basic, auto = endless_batches("basic"), endless_batches("autoaugment")
    batch = next(basic)
    sgd, sam = a_stepper(), a_stepper(rho=0.05)
    steps = itertools.count()
    host_basic, basic_kernels = host_part("basic")
    host_auto, auto_kernels = host_part("autoaugment")
    methods = {
        "hand-written SGD step": hand_written_step(batch),
        "engine's SGD step": lambda: sgd.step(batch, next(steps), 0.1).at_w.loss.item(),
        "engine's SAM step": lambda: sam.step(batch, next(steps), 0.1).at_w.loss.item(),
        "input, basic": lambda: next(basic),
        "input, AutoAugment + Cutout": lambda: next(auto),
        "host, basic": host_basic,
        "host, AutoAugment + Cutout": host_auto,
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
    print(f"\nWith a GPU {SPEED} times as fast as this core, and {LAUNCH_SECONDS * 1e6:g} us to launch a kernel:\n")
    step, rows = statistics.median(seconds["engine's SGD step"]), []
    for kind, kernels in (("basic", basic_kernels), ("AutoAugment + Cutout", auto_kernels)):
        on_host = ratio(seconds, f"host, {kind}", "engine's SGD step")[0]
        whole = ratio(seconds, f"input, {kind}", "engine's SGD step")[0]
        share = SPEED * (on_host + kernels * LAUNCH_SECONDS / step)
        rows.append([kind, str(kernels), f"{share:.2f}", f"{max(0.0, whole - on_host):.3f}"])
        rows[-1].append("yes" if share <= 1 else "NO")
    print(table(["input", "kernels", "host's share of a step", "GPU's share of a step", "keeps up"], rows))


if __name__ == "__main__":
    main()
