"""Loss and error of a model on a whole set of images, as at test time."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from flatmin.lab.data.pipeline import Batch
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.precision import autocast
from flatmin.lab.training.steps import loss_and_error

MANY_CLASSES = 100  # from here on the top-5 error is measured too, as for ImageNet


def what_is_evaluated(num_classes: int) -> tuple[str, ...]:
    """Return the names of the metrics that `evaluate` returns."""
    return ("loss", "error", "top5_error") if num_classes >= MANY_CLASSES else ("loss", "error")


@torch.no_grad()
def evaluate(
    network: nn.Module,
    batches: Iterable[Batch],
    names: tuple[str, ...],
    precision: Literal["float32", "bfloat16"],
    workers: Workers,
) -> dict[str, float]:
    """Return the means over all examples of all workers; leaves the model in evaluation mode."""
    network.eval()
    sums = torch.zeros(1 + len(names), dtype=torch.float64, device=workers.device)
    for batch in batches:
        with autocast(precision, workers.device):
            logits = network(batch.inputs)
        means = [torch.ones(()), *loss_and_error(logits, batch)]
        if "top5_error" in names:
            means.append(1 - (logits.topk(5).indices == batch.labels[:, None]).any(1).float().mean())
        sums += len(batch.examples) * torch.stack([value.to(sums) for value in means])
    num, *totals = workers.sum(sums).tolist()
    return {name: total / num for name, total in zip(names, totals, strict=True)}
