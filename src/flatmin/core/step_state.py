"""What of a SAM optimizer changes while it trains, and what each step measures along the way."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatmin.core.gradients import GradientMarks
from flatmin.core.weight_perturber import WeightPerturber


def _unknown() -> Tensor:
    return torch.full((), math.nan)


@dataclass(frozen=True)
class SAMMetrics:
    r"""What the last step measured: scalar tensors on the device, NaN where it was not measured.

    Reading one (``.item()``, ``float()``) synchronizes with the device; do so every few steps. A plain step (a radius
    of 0) has ``perturbation_norm`` 0 and an unknown ``perturbed_loss``.
    """

    loss: Tensor = field(default_factory=_unknown)
    """The loss at w, of the closure that gave the direction; with a rest, of the whole batch. In the two-pass form,
    what was passed to ``perturbed(loss)``."""
    perturbed_loss: Tensor = field(default_factory=_unknown)
    r"""The loss at :math:`w + \epsilon`, of the examples that SAM was applied to."""
    sharpness: Tensor = field(default_factory=_unknown)
    """The rise of the loss from w to w + eps, on the same examples; unknown with ``ascent=``, where they differ."""
    grad_norm: Tensor = field(default_factory=_unknown)
    r"""The dual norm :math:`\lVert g \rVert_q` of the gradient at w (for p = 2 the ordinary one); unknown if the
    direction is not the gradient."""
    perturbation_norm: Tensor = field(default_factory=_unknown)
    r""":math:`\lVert \epsilon \rVert_p`: rho, or 0 after a zero or non-finite gradient. It differs with ASAM."""

    @property
    def relative_sharpness(self) -> Tensor:
        """Sharpness over loss. At a good radius it is 0.05 to 0.15 in the first epoch and grows later.

        Above 0.3 at the start the radius is too large.
        """
        return self.sharpness / self.loss


@dataclass
class StepState:
    """All that changes, in one object: wrappers copy an optimizer's attributes, and must still see the same values."""

    rho: float
    model: nn.Module | None
    perturber: WeightPerturber = field(default_factory=WeightPerturber)
    metrics: SAMMetrics = field(default_factory=SAMMetrics)
    marks: GradientMarks = field(default_factory=GradientMarks)
    is_perturbed: bool = False
    num_steps: int = 0  # taken by this object
    warned: set[str] = field(default_factory=set)

    def warn_once(self, topic: str) -> bool:
        """Return True the first time it is asked about a topic."""
        first = topic not in self.warned
        self.warned.add(topic)
        return first

    def check_not_perturbed(self, call: str) -> None:
        """Raise if a call is made where the weights are perturbed."""
        if self.is_perturbed:
            raise ValueError(
                f"{call} was called inside `with opt.perturbed():`, where the weights are perturbed. "
                "Leave the block first: step() comes after it, and blocks cannot be nested."
            )
