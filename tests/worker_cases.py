"""What each of two processes does in tests/lab/training."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flatmin.lab.data.pipeline import Batch
from flatmin.lab.training.distributed import Workers, join_workers
from flatmin.lab.training.evaluation import evaluate


def groups_of_long_work(rank):
    """Return the timeouts of the groups whose collectives wait for the main process, and what it returned."""
    used = []
    broadcast = dist.broadcast_object_list

    def recorded(objects, *arguments, group=None, **settings):
        used.append(group._get_backend(torch.device("cpu")).options._timeout)
        return broadcast(objects, *arguments, group=group, **settings)

    os.environ["WORLD_SIZE"], dist.broadcast_object_list = "2", recorded
    try:
        with join_workers() as workers:
            return used, workers.on_main(lambda: f"from {rank}")
    finally:
        del os.environ["WORLD_SIZE"]
        dist.broadcast_object_list = broadcast


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
