"""The Hessian's largest eigenvalues where the training loss first falls below some values.

At the same epoch two methods have different losses, and the Hessian of cross-entropy shrinks with the loss. At the same
loss their curvature can be compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.sweeps.measurements import COUNT, Measured, Measurement, Range, eigenvalues
from flatmin.lab.training.trained_model import TrainedModel
from flatmin.measures import HessianOperator

CHOSEN_BY_LOSS: Range = (lambda _: False, "left out, because the loss chooses it")
LIMITS: Range = (lambda limits: bool(limits) and all(limit > 0 for limit in limits), "one or several positive numbers")


def first_below(losses: Iterable[tuple[int, float]], limits: Sequence[float]) -> dict[float, tuple[int, float] | None]:
    """Return for each limit the first epoch whose loss is below it, with that loss; None if there is none.

    ``losses`` are pairs of an epoch and its loss, in order. No more are read than are needed: a loss need not fall
    steadily, so every epoch before the last limit counts, and none after it.

    Example:
        >>> first_below([(1, 0.4), (2, 0.2), (3, 0.5), (4, 0.05)], [0.3, 0.1, 0.01])
        {0.3: (2, 0.2), 0.1: (4, 0.05), 0.01: None}
    """
    found: dict[float, tuple[int, float] | None] = dict.fromkeys(limits)
    for epoch, loss in losses:
        found |= {limit: (epoch, loss) for limit, at in found.items() if at is None and loss < limit}
        if None not in found.values():
            break
    return found


@dataclass(frozen=True, kw_only=True)
class SpectrumAtLoss(Measurement, kind="spectrum_at_loss", epoch=CHOSEN_BY_LOSS, limits=LIMITS, num_eigenvalues=COUNT):
    """The Hessian's largest eigenvalues at the first saved epoch whose training loss is below each of some limits.

    The loss is evaluated after the epoch, on the images that the Hessian is of: not augmented, each once. The losses of
    ``metrics.jsonl`` are running means over an epoch's steps, with augmentation. The run has to save its weights
    (``keep_every``).
    """

    limits: tuple[float, ...] = (0.3, 0.1, 0.03)
    """What the loss has to fall below."""
    num_eigenvalues: int = 5
    """How many of the largest eigenvalues."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Evaluate the saved weights in order, as far as needed, and measure the Hessian where a limit is passed."""
        data = trained.batches(trained.dataset.train, self.num_examples)
        every = trained.experiment.keep_every or 1
        losses: list[float] = []

        def evaluated() -> Iterable[tuple[int, float]]:
            for epoch in range(every, trained.epoch + 1, every):
                losses.append(mean_loss(trained.at_epoch(epoch).network, data))
                yield epoch, losses[-1]

        found = first_below(evaluated(), self.limits)
        spectra = {
            epoch: eigenvalues(
                HessianOperator(trained.at_epoch(epoch).network, F.cross_entropy, data), self.num_eigenvalues
            )
            for epoch in {at[0] for at in found.values() if at is not None}
        }
        return {
            "keep_every": every,
            "losses": losses,
            "at_loss": {
                f"{limit:g}": None if at is None else {"epoch": at[0], "loss": at[1], **spectra[at[0]]}
                for limit, at in found.items()
            },
            "num_examples": sum(len(labels) for _, labels in data),
        }, None


@torch.no_grad()
def mean_loss(network: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean cross-entropy over all examples; the sum is in float64."""
    total = sum(F.cross_entropy(network(images), labels, reduction="sum").double() for images, labels in data)
    return float(total) / sum(len(labels) for _, labels in data)
