"""The weighted mean of gradients over micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientMean:
    """Takes the gradients of one micro-batch after the other and puts their weighted mean in their place.

    It needs one more copy of the gradients. A parameter that some micro-batches do not use counts as 0 there; one that
    none of them uses keeps no gradient.

    Args:
        parameters: whose gradients these are.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._total: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def take(self, share: float) -> None:
        """Add the present gradients, times share, and remove them."""
        present = {p: p.grad for p in self._parameters if p.grad is not None}
        if new := {p: grad for p, grad in present.items() if p not in self._total}:
            self._total.update(zip(new, torch._foreach_mul(list(new.values()), share), strict=True))
        if old := [p for p in present if p not in new]:
            torch._foreach_add_([self._total[p] for p in old], [present[p] for p in old], alpha=share)
        for p in present:
            p.grad = None

    def put(self) -> None:
        """Make the mean the parameters' gradient."""
        for p in self._parameters:
            p.grad = self._total.get(p)
