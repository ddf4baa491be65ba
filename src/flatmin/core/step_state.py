"""What of a SAM optimizer changes while it trains."""

from dataclasses import dataclass, field

from torch import nn

from flatmin.core.gradient_marks import GradientMarks
from flatmin.core.metrics import SAMMetrics
from flatmin.core.weight_perturber import WeightPerturber


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
