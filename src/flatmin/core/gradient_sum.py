"""The weighted sum of the gradients of several passes."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSum:
    """Takes the gradients of one pass after the other, and puts their weighted sum in their place.

    It needs one more copy of the gradients. A parameter that some passes do not use counts as 0 there; one that none of
    them uses keeps no gradient.

    Args:
        parameters: whose gradients these are.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._total: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def take(self, weight: float) -> None:
        """Add the current gradients, times weight, and remove them."""
        current = {p: p.grad for p in self._parameters if p.grad is not None}
        if new := {p: grad for p, grad in current.items() if p not in self._total}:
            self._total.update(zip(new, torch._foreach_mul(list(new.values()), weight), strict=True))
        if old := [p for p in current if p not in new]:
            torch._foreach_add_([self._total[p] for p in old], [current[p] for p in old], alpha=weight)
        for p in current:
            p.grad = None

    @torch.no_grad()
    def put(self, factor: float = 1.0) -> None:
        """Make the sum, times factor, the parameters' gradient."""
        if factor != 1.0:
            torch._foreach_mul_(list(self._total.values()), factor)
        for p in self._parameters:
            p.grad = self._total.get(p)
