"""What of a SAM optimizer changes while it trains."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from flatmin.core.metrics import SAMMetrics
from flatmin.core.rng import RandomState
from flatmin.core.weight_perturber import WeightPerturber

MARK = "_sam_pass"  # an attribute of gradients


@dataclass
class StepState:
    """All that changes, in one object: wrappers copy an optimizer's attributes, and must still see the same values.

    A completed pass at w + eps allows one step. The permission is tied to the gradients that the pass left: once they
    are gone (after a step that a GradScaler skipped, say) it is void.
    """

    rho: float
    model: nn.Module | None
    perturber: WeightPerturber = field(default_factory=WeightPerturber)
    metrics: SAMMetrics = field(default_factory=SAMMetrics)
    is_perturbed: bool = False
    keeps_gradients: bool = False  # zero_grad() does nothing: a closure's gradient is to be added to the others
    zeroed: bool = False  # zero_grad() was called since the first pass began
    num_steps: int = 0  # taken by this object
    noise: RandomState | None = None  # as it was before the first pass of the two-pass form
    warned: set[str] = field(default_factory=set)
    _permission: object | None = None
    _used: object | None = None
    _version: int = -1  # of the marked gradient, when it was marked or used

    def allow_step(self, parameters: Iterable[Tensor]) -> None:
        """Allow one step with the current gradients, if there are any."""
        self._permission = object()
        for p in parameters:
            if p.grad is not None:
                setattr(p.grad, MARK, self._permission)
                self._version = p.grad._version

    def revoke_step(self) -> None:
        """Withdraw the permission."""
        self._permission = None

    def step_allowed(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether a pass at w + eps was completed and its gradients, or some of them, are still there."""
        return any(p.grad is not None and self._is_marked(p.grad) for p in parameters)

    def consume_step(self, parameters: Iterable[Tensor]) -> None:
        """Use up the permission after a step; its gradients stay where they are until they are zeroed."""
        self._used, self.zeroed, self.noise = self._permission, False, None
        marked = [p.grad for p in parameters if p.grad is not None and self._is_marked(p.grad)]
        self._version = marked[-1]._version if marked else -1
        self.revoke_step()

    def unused_pass(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients hold a pass at w + eps that no step has used, and one more backward pass."""
        return self._permission is not None and self._was_added_to(parameters, self._permission)

    def used_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients of the last step were added to instead of being zeroed."""
        return self._used is not None and not self.zeroed and self._was_added_to(parameters, self._used)

    def _was_added_to(self, parameters: Iterable[Tensor], mark: object) -> bool:
        """Return whether marked gradients were written to at most once since: by a backward pass.

        Zeroing in place is a write too, so that gradients zeroed by something else (``model.zero_grad``) have two.
        """
        grads = [p.grad for p in parameters if p.grad is not None and getattr(p.grad, MARK, None) is mark]
        return bool(grads) and grads[-1]._version <= self._version + 1

    def versions(self, parameters: Iterable[Tensor]) -> list[int | None]:
        """Return how often each gradient was written to, None for one that the permission is not tied to."""
        grads = (p.grad for p in parameters)
        return [g._version if g is not None and self._is_marked(g) else None for g in grads]

    def _is_marked(self, grad: Tensor) -> bool:
        return self._permission is not None and getattr(grad, MARK, None) is self._permission

    def warn_once(self, topic: str) -> bool:
        """Return True the first time it is asked about a topic."""
        first = topic not in self.warned
        self.warned.add(topic)
        return first
