"""Gradients of several passes: their weighted sum, and marks on them.

The marks say which pass a gradient is from, whether a step has used it, and how many backward passes it sums up.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Attributes of gradients. A gradient that is zeroed to None loses them; one that is changed in place keeps them.
PASS = "_sam_pass"
OLDER = "_sam_older"
BACKWARDS = "_sam_backwards"
UNSCALED = "_sam_unscaled"


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Set gradients to None, without the marks of ``opt.zero_grad()``."""
    for p in parameters:
        p.grad = None


class GradientSum:
    """Takes the gradients of one pass after the other, and puts their weighted sum in their place.

    It needs one more copy of the gradients. A parameter that some passes do not use counts as 0 there; one that none of
    them uses keeps no gradient.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._total: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def take(self, weight: float) -> None:
        """Add the current gradients, times weight, and remove them."""
        current = {p: p.grad for p in self._parameters if p.grad is not None}
        if new := {p: grad for p, grad in current.items() if p not in self._total}:
            self._total.update(zip(new, torch._foreach_mul(list(new.values()), weight), strict=True))
        if old := [p for p in current if p not in new]:
            torch._foreach_add_([self._total[p] for p in old], [current[p] for p in old], alpha=weight)
        drop_gradients(current)

    @torch.no_grad()
    def put(self, factor: float = 1.0) -> None:
        """Make the sum, times factor, the parameters' gradient."""
        if factor != 1.0:
            torch._foreach_mul_(list(self._total.values()), factor)
        for p in self._parameters:
            p.grad = self._total.get(p)


@dataclass
class GradientMarks:
    """What SAM knows of the gradients that are there now.

    A completed pass at w + eps allows one step. The permission is tied to the gradients that the pass left: once they
    are gone (after a step that a GradScaler skipped, say) it is void.
    """

    is_held: bool = False  # zero_grad() does nothing: a closure's gradient is to be added to the others
    zeroed: bool = False  # zero_grad() was called since the first pass began
    _permission: object | None = None
    _unscaled: object | None = None
    _used: object | None = None
    _version: int = -1  # of the marked gradient, when it was marked or used
    _watched: list[Tensor] = field(default_factory=list)

    # Permission for a step.

    def allow_step(self, parameters: Iterable[Tensor]) -> None:
        """Allow one step with the current gradients, if there are any."""
        self._permission = object()
        for p in parameters:
            if p.grad is not None:
                setattr(p.grad, PASS, self._permission)
                self._version = p.grad._version

    def revoke_step(self) -> None:
        """Withdraw the permission."""
        self._permission = None

    def step_allowed(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether a pass at w + eps was completed and its gradients, or some of them, are still there."""
        return any(p.grad is not None and self._is_allowed(p.grad) for p in parameters)

    def consume_step(self, parameters: Iterable[Tensor]) -> None:
        """Use up the permission after a step; its gradients stay where they are until they are zeroed."""
        self._used, self.zeroed = self._permission, False
        marked = [p.grad for p in parameters if p.grad is not None and self._is_allowed(p.grad)]
        self._version = marked[-1]._version if marked else -1
        self.revoke_step()
        self.forget_backwards()

    def unused_pass(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients hold a pass at w + eps that no step has used, and one more backward pass."""
        return self._permission is not None and self._was_added_to(parameters, self._permission)

    def used_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients of the last step were added to instead of being zeroed."""
        return self._used is not None and not self.zeroed and self._was_added_to(parameters, self._used)

    def _was_added_to(self, parameters: Iterable[Tensor], mark: object) -> bool:
        """Return whether marked gradients were written to at most once since: by a backward pass.

        Zeroing in place is a write too: gradients zeroed by something else (``model.zero_grad``) have two.
        """
        grads = [p.grad for p in parameters if p.grad is not None and getattr(p.grad, PASS, None) is mark]
        return bool(grads) and grads[-1]._version <= self._version + 1

    def versions(self, parameters: Iterable[Tensor]) -> list[int | None]:
        """Return how often each gradient was written to, None for one that the permission is not tied to."""
        grads = (p.grad for p in parameters)
        return [g._version if g is not None and self._is_allowed(g) else None for g in grads]

    def _is_allowed(self, grad: Tensor) -> bool:
        return self._permission is not None and getattr(grad, PASS, None) is self._permission

    # A GradScaler unscales once a step: if it does so before the pass at w + eps, that pass's gradients stay scaled.

    def at_unscaling(self, parameters: Iterable[Tensor]) -> None:
        """Mark gradients that are unscaled, unless a completed pass at w + eps left them."""
        parameters = list(parameters)
        if not self.step_allowed(parameters):
            self._unscaled = object()
            for p in parameters:
                if p.grad is not None:
                    setattr(p.grad, UNSCALED, self._unscaled)

    def unscaled(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients were unscaled."""
        return self._unscaled is not None and any(getattr(p.grad, UNSCALED, None) is self._unscaled for p in parameters)

    # A pass that may add to older gradients.

    def mark_older(self, parameters: Iterable[Tensor]) -> Callable[[], int | None]:
        """Mark the gradients before a pass, and return a function that says what became of them.

        It returns how often they were written to, None if they were replaced. A mark and not a reference, which would
        keep the older gradient's memory through the pass.
        """
        older, mark = next((p for p in parameters if p.grad is not None), None), object()
        if older is None or older.grad is None:
            return lambda: None
        setattr(older.grad, OLDER, mark)
        version = older.grad._version

        def writes() -> int | None:
            grad = older.grad
            return grad._version - version if grad is not None and getattr(grad, OLDER, None) is mark else None

        return writes

    # The number of backward passes in a gradient.

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Count the backward passes of the first and the last parameter from now on."""
        trained = [p for p in parameters if p.requires_grad and p.is_leaf]
        for p in {id(p): p for p in trained[:1] + trained[-1:]}.values():
            if not any(p is seen for seen in self._watched):
                p.register_post_accumulate_grad_hook(_count)  # type: ignore[no-untyped-call]
                self._watched.append(p)

    def num_backwards(self) -> int:
        """Return how many backward passes the current gradients sum up."""
        return max((getattr(p.grad, BACKWARDS, (0, 0))[0] for p in self._watched), default=0)

    def forget_backwards(self) -> None:
        """Count from 0: the gradients were zeroed in place, or used."""
        self._unscaled = None
        for p in self._watched:
            if p.grad is not None:
                setattr(p.grad, BACKWARDS, (0, p.grad._version))


def _count(parameter: Tensor) -> None:
    """Count a backward pass; start again where something else wrote to the gradient since the last one."""
    grad = parameter.grad
    if grad is not None:
        count, version = getattr(grad, BACKWARDS, (0, grad._version - 1))
        setattr(grad, BACKWARDS, (count + 1 if grad._version <= version + 1 else 1, grad._version))
