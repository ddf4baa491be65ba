"""What runs cost: how often an image passes forward and backward through a model, FLOPs and disk."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from flatmin.lab.models.build import build_model
from flatmin.lab.runs.checkpoint import NUM_KEPT
from flatmin.lab.spec.datasets import dataset_info
from flatmin.lab.spec.experiment import Experiment, Model, passes_per_step
from flatmin.lab.sweeps.jobs import Job

BIRDSNAP = 47_386
"""Of a dataset that is a directory for the lab."""
SVHN_EXTRA = 531_131


def cost(jobs: Iterable[Job]) -> int:
    """Return the passes over images that training takes: epochs times images times passes of a step, over all runs.

    A run that occurs twice counts once; one that stops at a loss counts in full; measuring and testing do not count.

    Example:
        >>> from flatmin.lab.spec.experiment import Data, Optim
        >>> sam = Experiment(data=Data(train_size=100), optim=Optim(rho=0.1), epochs=3)
        >>> cost([Job(experiment=sam), Job(experiment=sam, seed=1), Job(experiment=sam, seed=1)])
        1200
    """
    return sum(map(_passes, _experiments(jobs)))


def num_models(jobs: Iterable[Job]) -> int:
    """Return how many models are trained, including models whose predictions are another's labels."""
    return len(_experiments(jobs))


def training_flops(jobs: Iterable[Job]) -> int:
    """Return the floating-point operations of training; a pass forward and backward costs three forward passes."""
    return sum(3 * _passes(e) * model_flops(e) for e in _experiments(jobs))


def disk_bytes(jobs: Iterable[Job]) -> int:
    """Return what the checkpoints of all runs take: two each, and the weights that are kept along training."""
    total = 0
    for experiment in _experiments(jobs):
        copies = {"sgd": 2, "adamw": 3}[experiment.optim.name]  # the weights and the optimizer's averages
        every = experiment.keep_every
        kept = 0 if every is None else 1 + experiment.epochs // every
        total += (NUM_KEPT * copies + kept) * 4 * num_weights(experiment)
    return total


def num_weights(experiment: Experiment) -> int:
    """Return the number of a model's parameters; nothing is computed."""
    return _size_and_flops(experiment.model, experiment.data.name, experiment.data.image_size)[0]


def model_flops(experiment: Experiment) -> int:
    """Return the floating-point operations of a model's forward pass over one image; nothing is computed."""
    return _size_and_flops(experiment.model, experiment.data.name, experiment.data.image_size)[1]


@lru_cache(maxsize=256)
def _size_and_flops(model: Model, dataset: str, image_size: int | None) -> tuple[int, int]:
    info = dataset_info(dataset)
    channels, size = info.channels, image_size or info.size
    with torch.device("meta"):  # shapes alone
        fresh = model.without_checkpoint()
        network = build_model(fresh, num_classes=info.num_classes or 1000, in_channels=channels).eval()
        images = torch.empty(1, channels, size, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(images)
    return sum(p.numel() for p in network.parameters()), int(counter.get_total_flops())


def _experiments(jobs: Iterable[Job]) -> list[Experiment]:
    """Return the experiment of each run, and of those that have to be run before it."""
    experiments = {}
    for job in jobs:
        experiments[job.name] = job.experiment
        if job.experiment.data.bootstrap:
            first = job.experiment.first_stage()
            experiments[first.run_name(job.seed)] = first
    return list(experiments.values())


def _passes(experiment: Experiment) -> int:
    return round(experiment.epochs * num_images(experiment) * passes_per_step(experiment))


def num_images(experiment: Experiment) -> int:
    """Return how many images an experiment is trained on."""
    data = experiment.data
    if data.train_size is not None:
        return data.train_size
    size = BIRDSNAP if data.name == "folder:birdsnap" else dataset_info(data.name).num_train
    if not size:
        raise ValueError(f"The size of {data.name} is not known. Give data.train_size.")
    size += SVHN_EXTRA if data.extra else 0
    return size - round(data.validation * size)
