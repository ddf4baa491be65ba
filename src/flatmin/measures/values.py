"""Losses and error rates, and their sums over batches."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class NoErrorRateError(ValueError):
    """The outputs are not a classifier's."""


@dataclass(frozen=True)
class Value:
    """The loss, and the error rate where it was asked for (NaN otherwise), on some examples."""

    loss: float
    error: float
    num_examples: int

    def metric(self, name: str) -> float:
        """Return the loss or the error."""
        return self.error if name == "error" else self.loss


class Totals:
    """Sums over the examples seen so far."""

    def __init__(self) -> None:
        self.loss, self.error, self.num = 0.0, 0.0, 0

    def add(self, loss: Tensor, outputs: Any, targets: Any, num: int, error: bool) -> None:
        """Count a batch of num examples."""
        self.loss += float(loss.detach()) * num
        self.error += error_rate(outputs, targets) * num if error else math.nan
        self.num += num


def error_rate(outputs: Any, targets: Any) -> float:
    """Return the fraction of wrong predictions: the largest output (dimension 1) is not the target's.

    Example:
        >>> import torch
        >>> error_rate(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        0.5
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim >= 2:
        labels = targets.argmax(1) if targets.is_floating_point() and targets.shape == outputs.shape else targets
        predicted = outputs.argmax(1)
        if labels.shape == predicted.shape and not labels.is_floating_point():
            return int((predicted != labels).sum()) / labels.numel()
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (outputs, targets)]
    raise NoErrorRateError(
        f"The error rate needs outputs (N, classes, ...) and targets (N, ...) with classes, got {shapes[0]} and "
        f"{shapes[1]}. For other outputs use metric='loss'."
    )
