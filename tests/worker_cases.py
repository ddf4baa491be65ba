"""What each of two processes does in tests/lab/training."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.lab.data.pipeline import Batch
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.training.distributed import Workers, join_workers
from flatmin.lab.training.engine import train
from flatmin.lab.training.evaluation import evaluate
from flatmin.lab.training.steps import Stepper
from two_processes import recorded_collectives


def groups_of_long_work(rank):
    """Return the timeouts of the groups whose collectives wait for the main process, and what it returned."""
    os.environ["WORLD_SIZE"] = "2"
    try:
        with recorded_collectives() as calls, join_workers() as workers:
            result = workers.on_main(lambda: f"from {rank}")
    finally:
        del os.environ["WORLD_SIZE"]
    groups = [kwargs["group"] for name, _, kwargs in calls if name == "broadcast_object_list"]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups], result


def predictions():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(41, 3, generator=generator)
    return logits, torch.randint(3, (41,), generator=generator)


def evaluated_ece(rank):
    """Return the calibration error of two workers with 20 and 21 examples."""
    logits, labels = (part[20 * rank : 20 + 21 * rank] for part in predictions())
    batch = Batch(
        number=0,
        examples=np.arange(len(labels)),
        inputs=logits,
        labels=labels,
        partner_labels=labels,
        own_weight=1.0,
        share=1.0,
    )
    workers = Workers(rank=rank, count=2, device=torch.device("cpu"))
    return evaluate(nn.Identity(), [batch], ("loss", "error", "ece"), "float32", workers)["ece"]


def train_all(rank, specs, runs):
    """Train experiments one after the other, and tell which examples this worker saw in each."""
    seen, step = [], Stepper.step

    def recorded_step(self, batch, number, lr):
        seen.append((number, batch.examples.tolist()))
        return step(self, batch, number, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(rank))
        patch.setattr(Stepper, "step", recorded_step)
        for number, spec in enumerate(specs):
            seen.clear()
            train(Experiment.from_json(spec), runs=runs, checkpoint_seconds=0)
            (runs / f"seen-{number}-{rank}.json").write_text(json.dumps(seen))


def train_and_die(folder, die_at):
    """Train what is asked for in a folder, under torchrun; worker 1 kills itself at a step, once."""
    step = Stepper.step

    def deadly_step(self, batch, number, lr):
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if number == die_at and first_life and self.workers.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch, number, lr)

    Stepper.step = deadly_step
    train(Experiment.from_json((folder / "asked.json").read_text()), runs=folder, checkpoint_seconds=0)
