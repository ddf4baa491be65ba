"""The radius of a run whose ``optim.rho`` is auto or a factor: suggested by its own training batches."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from flatmin import SAM, RhoSuggestion, RiseCurve, suggest_rho
from flatmin.lab.data.pipeline import Batch
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.models.build import set_training_mode
from flatmin.lab.models.shake import true_gradient
from flatmin.lab.runs.directory import run_seed
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.steps import Stepper, parameter_groups
from flatmin.lab.training.trained_model import TrainedModel

NUM_BATCHES = 8


def suggestion(stepper: Stepper, batches: Iterable[Batch], m: int | None = None) -> RhoSuggestion:
    """Return what ``flatmin.suggest_rho`` finds on the first batches, with m examples per eps, the run's own if None.

    The loss is the run's, with its augmentation, label noise, random layers and (``decay="loss"``) weight decay. All
    workers find the same.
    """
    optim, taken = stepper.optim, list(islice(batches, NUM_BATCHES))
    opt = stepper.optimizer
    if not isinstance(opt, SAM) or optim.direction != "gradient":
        opt = SAM(
            torch.optim.SGD(parameter_groups(optim, stepper.network), lr=0.0),
            p=optim.p,
            adaptive=False if optim.adaptive is None else optim.adaptive,
            model=stepper.forward,
            sync_perturbation=optim.sync_perturbation,
        )

    def loss_fn(rows: Tensor) -> Tensor:
        (number, start), (_, last) = rows[0].tolist(), rows[-1].tolist()
        return stepper.loss(taken[number].slice(start, last + 1))

    # Rows (batch, example) stand for the examples, which are more than tensors where there is Mixup.
    rows = [
        torch.stack([torch.full((len(b.examples),), n), torch.arange(len(b.examples))], 1) for n, b in enumerate(taken)
    ]
    # As in step 0; all of this is put back.
    torch.manual_seed(torch_seed(stepper.seed, Purpose.NETWORK_NOISE, 0, stepper.workers.rank))
    with true_gradient(stepper.network):
        return suggest_rho(opt, loss_fn, rows, m=m or stepper.examples_per_eps(taken[0]), num_batches=NUM_BATCHES)


def measured_rise(trained: TrainedModel, m: int | None, num_examples: int | None) -> tuple[RhoSuggestion, RiseCurve]:
    """Return the suggestion for a run's model as training would go on, and the rise of its loss over rho.

    For weights after epoch 0 it is the run's own suggestion.
    """
    experiment, network, images = trained.experiment, trained.network, trained.dataset.train
    seed = run_seed(trained.directory) or 0
    if experiment.data.bootstrap:
        seed = torch_seed(seed, Purpose.SECOND_STAGE)
    stepper = Stepper(experiment, network, seed, Workers(device=trained.pipeline.device))
    if num_examples is not None:
        images = images.take(np.arange(len(images.labels))[:num_examples])
    set_training_mode(network, experiment.model)
    try:
        batches = replace(trained.pipeline, seed=seed).training(images, trained.epoch)
        found = suggestion(stepper, batches, m)
        with true_gradient(network):
            return found, found.measure()
    finally:
        network.eval()
