"""What of a SAM optimizer changes while it trains."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from flatmin.core.batchnorm import NormalizationBuffers
from flatmin.core.metrics import SAMMetrics
from flatmin.core.weight_perturber import WeightPerturber

MARK = "_sam_pass"  # an attribute of gradients


@dataclass
class SharedState:
    """All that changes, in one object: wrappers copy an optimizer's attributes, and must still see the same values.

    A completed pass at w + eps is a permission to take one step. It is tied to the gradients that the pass left: once
    they are gone (after a step that a GradScaler skipped, say) it is void.
    """

    rho: float
    model: nn.Module | None
    perturber: WeightPerturber = field(default_factory=WeightPerturber)
    metrics: SAMMetrics = field(default_factory=SAMMetrics)
    is_perturbed: bool = False  # the parameters stand at w + eps
    zeroed: bool = False  # zero_grad() was called since the first pass began
    warned: set[str] = field(default_factory=set)
    buffers: NormalizationBuffers = field(init=False)
    _permission: object | None = None
    _spent: object | None = None

    def __post_init__(self) -> None:
        self.buffers = NormalizationBuffers(self.model)

    def allow_step(self, parameters: Iterable[Tensor]) -> None:
        """Allow one step with the gradients that are there now, if there are any."""
        self._permission = object()
        for p in parameters:
            if p.grad is not None:
                setattr(p.grad, MARK, self._permission)

    def consume_step(self) -> None:
        """Use the permission up by a step; its gradients stay where they are until they are zeroed."""
        self._spent, self.zeroed = self._permission, False
        self.revoke_step()

    def holds_spent_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients are those of the last step, or were added to them."""
        if self._spent is None or self.zeroed:
            return False
        grad = next((p.grad for p in parameters if p.grad is not None), None)
        return grad is not None and getattr(grad, MARK, None) is self._spent

    def revoke_step(self) -> None:
        """Withdraw the permission."""
        self._permission = None

    def step_allowed(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether a pass at w + eps was completed and its gradients, or some of them, are still there."""
        return any(p.grad is not None and self._tied(p.grad) for p in parameters)

    def versions(self, parameters: Iterable[Tensor]) -> list[int | None]:
        """Return how often each gradient was written to, None for one that the permission is not tied to."""
        grads = (p.grad for p in parameters)
        return [g._version if g is not None and self._tied(g) else None for g in grads]

    def _tied(self, grad: Tensor) -> bool:
        return self._permission is not None and getattr(grad, MARK, None) is self._permission

    def warn_once(self, topic: str) -> bool:
        """Return True the first time it is asked about a topic."""
        first = topic not in self.warned
        self.warned.add(topic)
        return first
