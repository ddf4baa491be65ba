"""Loss, error and calibration of a model: of a batch, and of a whole set of images as at test time."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.data.pipeline import Batch, even_cuts
from flatmin.lab.training.distributed import Workers

MANY_CLASSES = 100  # from here on the top-5 error is measured too, as for ImageNet
NUM_BINS = 15  # of the calibration error, as is customary (Guo et al., 2017)

Precision = Literal["float32", "bfloat16"]


def resolve_precision(precision: Literal["auto"] | Precision, device: torch.device) -> Precision:
    """Return what ``auto`` means: bfloat16 if the device multiplies it natively; elsewhere it is emulated, and slow."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "bf16")))
    return "bfloat16" if native else "float32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the model is called."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def loss_and_error(logits: Tensor, batch: Batch, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    r"""Return cross-entropy and error rate of a batch; with Mixup, both are mixed like the images.

    :math:`\lambda\, l(y) + (1 - \lambda)\, l(y')` (Zhang et al., 2018), where y' are the partners' classes.
    """
    logits = logits.float()
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
    predicted = logits.detach().argmax(1)
    error = (predicted != batch.labels).float().mean()
    if batch.own_weight != 1.0:
        other = F.cross_entropy(logits, batch.partner_labels, label_smoothing=label_smoothing)
        loss = batch.own_weight * loss + (1 - batch.own_weight) * other
        other_error = (predicted != batch.partner_labels).float().mean()
        error = batch.own_weight * error + (1 - batch.own_weight) * other_error
    return loss, error


def what_is_evaluated(num_classes: int) -> tuple[str, ...]:
    """Return the names of the metrics that `evaluate` returns."""
    return ("loss", "error", "ece", "top5_error") if num_classes >= MANY_CLASSES else ("loss", "error", "ece")


@torch.no_grad()
def evaluate(
    network: nn.Module,
    batches: Iterable[Batch],
    names: tuple[str, ...],
    precision: Precision,
    workers: Workers,
) -> dict[str, float]:
    """Return metrics over all examples of all workers; leaves the model in evaluation mode.

    ``loss`` is the negative log-likelihood, without label smoothing; ``ece`` is `calibration_error`.
    """
    network.eval()
    means = [name for name in names if name != "ece"]
    sums = torch.zeros(1 + len(means), dtype=torch.float64, device=workers.device)
    predictions = [sums.new_zeros(0, 2)]  # confidence, and whether it is right
    for batch in batches:
        with autocast(precision, workers.device):
            logits = network(batch.inputs)
        values = [torch.ones(()), *loss_and_error(logits, batch)]
        if "top5_error" in names:
            values.append(1 - (logits.topk(5).indices == batch.labels[:, None]).any(1).float().mean())
        sums += len(batch.examples) * torch.stack([value.to(sums) for value in values])
        if "ece" in names:
            confidence, predicted = logits.to(sums).softmax(1).max(1)
            predictions.append(torch.stack([confidence, (predicted == batch.labels).to(confidence)], 1))
    num, *totals = workers.sum(sums).tolist()
    found = {name: total / num for name, total in zip(means, totals, strict=True)}
    if "ece" in names:
        found["ece"] = calibration_error(_of_all_workers(torch.cat(predictions), workers)).item()
    return {name: found[name] for name in names}


def calibration_error(predictions: Tensor) -> Tensor:
    r"""Return the expected calibration error :math:`\sum_b \frac{n_b}{n} |acc_b - conf_b|` over 15 bins of equal mass.

    The bins hold equally many predictions, ordered by confidence. Predictions of the same confidence share their
    accuracy, so the order of examples does not matter. A row is the probability of the predicted class, and 1 where it
    is right, else 0.

    Example:
        Of two predictions with 75 % confidence, one is right:

        >>> calibration_error(torch.tensor([[0.75, 1.0], [0.75, 0.0]], dtype=torch.float64)).item()
        0.25
    """
    levels, which, counts = torch.unique(predictions[:, 0], return_inverse=True, return_counts=True)
    accuracy = torch.zeros_like(levels).index_add_(0, which, predictions[:, 1]) / counts
    order = which.sort().values
    gaps = (accuracy - levels)[order].cumsum(0)
    cuts = torch.tensor(even_cuts(len(order), min(NUM_BINS, len(order))), device=gaps.device)
    return torch.cat([gaps.new_zeros(1), gaps])[cuts].diff().abs().sum() / len(order)


def _of_all_workers(rows: Tensor, workers: Workers) -> Tensor:
    """Return the rows of all workers, which may have different numbers of them."""
    sizes = [int(size) for size in workers.gather(torch.tensor(len(rows), device=rows.device))]
    padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), rows.shape[1])])
    return torch.cat([part[:size] for part, size in zip(workers.gather(padded), sizes, strict=True)])
