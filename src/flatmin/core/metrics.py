"""What a step of SAM measures by the way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


def _unknown() -> Tensor:
    return torch.full((), math.nan)


@dataclass(frozen=True)
class SAMMetrics:
    r"""What the last step measured: scalar tensors on the device, NaN where it was not measured.

    Reading one (``.item()``, ``float()``) waits for the device; do so every so many steps.
    """

    loss: Tensor = field(default_factory=_unknown)
    """The loss at w, of the closure that gave the direction. Unknown for ``perturbed()``: you have it yourself."""
    perturbed_loss: Tensor = field(default_factory=_unknown)
    r"""The loss at :math:`w + \epsilon`."""
    sharpness: Tensor = field(default_factory=_unknown)
    """Their difference; unknown with ``ascent=``, where they are of different data."""
    grad_norm: Tensor = field(default_factory=_unknown)
    r"""The dual norm :math:`\lVert g \rVert_q` of the gradient at w (for p = 2 the ordinary one)."""
    perturbation_norm: Tensor = field(default_factory=_unknown)
    r""":math:`\lVert \epsilon \rVert_p`: rho, or 0 after a zero or non-finite gradient. It differs with ASAM."""


def weighted_mean(measured: Sequence[SAMMetrics], shares: Sequence[float]) -> SAMMetrics:
    """Return the mean of the metrics of several micro-batches; the shares sum to 1."""

    def mean(name: str) -> Tensor:
        values = [getattr(metrics, name) * share for metrics, share in zip(measured, shares, strict=True)]
        return torch.stack(values).sum()

    return SAMMetrics(**{f.name: mean(f.name) for f in fields(SAMMetrics)})
