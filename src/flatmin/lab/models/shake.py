r"""The random coefficients of Shake-Shake (Gastaldi, 2017) and ShakeDrop (Yamada et al., 2019).

Both multiply a branch by one random coefficient on the way forward and by another on the way back, drawn again
for each image. The result is not a gradient of anything, so SAM's first pass, whose gradient decides where w +
eps lies, uses the same coefficient on both ways ("true gradient"), as the reference implementation did:
:func:`true_gradient`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ForwardBackwardScale(torch.autograd.Function):
    """Multiplies by one factor on the way forward and by another on the way back."""

    @staticmethod
    def forward(x: Tensor, forward_scale: Tensor, backward_scale: Tensor) -> Tensor:
        """Return x * forward_scale."""
        return x * forward_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep the factor of the way back."""
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return grad * backward_scale."""
        (backward_scale,) = ctx.saved_tensors
        return grad * backward_scale, None, None


class RandomScale(nn.Module):
    """A layer with forward and backward coefficients; ``use_true_gradient`` makes them equal."""

    use_true_gradient: bool = False

    def scale(self, x: Tensor, forward_scale: Tensor, backward_scale: Tensor) -> Tensor:
        """Return x times its coefficients, in x's dtype."""
        backward_scale = forward_scale if self.use_true_gradient else backward_scale
        factors = (forward_scale.to(x.dtype), backward_scale.to(x.dtype))
        scaled: Tensor = ForwardBackwardScale.apply(x, *factors)  # type: ignore[no-untyped-call]
        return scaled


class ShakeShake(RandomScale):
    r"""Mixes branches: :math:`\alpha x_1 + (1 - \alpha) x_2` forward, with :math:`\beta` backward.

    :math:`\alpha, \beta \sim U(0, 1)` independently, for each image and each pass ("Shake-Shake-Image"). In
    evaluation both branches have the expected weight 1/2.
    """

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the mixture of the branches (N, C, H, W)."""
        if not self.training:
            return (first + second) / 2
        alpha, beta = torch.rand(2, len(first), 1, 1, 1, device=first.device)
        return self.scale(first, alpha, beta) + self.scale(second, 1 - alpha, 1 - beta)


class ShakeDrop(RandomScale):
    r"""Multiplies by :math:`b + \alpha - b \alpha` forward and :math:`b + \beta - b \beta` backward.

    :math:`b \sim \mathrm{Bernoulli}(p)`, :math:`\alpha \sim U(-1, 1)`, :math:`\beta \sim U(0, 1)`, for each
    image. With b = 1 the branch passes as it is. In evaluation it has the expected factor
    :math:`E[b + \alpha - b \alpha] = p`.

    Args:
        survival: p.
    """

    def __init__(self, survival: float) -> None:
        super().__init__()
        self.survival = survival

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch x (N, C, H, W) times its coefficients."""
        if not self.training:
            return x * self.survival
        uniform, alpha, beta = torch.rand(3, len(x), 1, 1, 1, device=x.device)
        alive = uniform < self.survival
        one = torch.ones_like(alpha)
        return self.scale(x, torch.where(alive, one, 2 * alpha - 1), torch.where(alive, one, beta))


@contextmanager
def true_gradient(network: nn.Module) -> Iterator[None]:
    """Let Shake-Shake and ShakeDrop use their forward coefficients on the way back as well."""
    layers = [layer for layer in network.modules() if isinstance(layer, RandomScale)]
    for layer in layers:
        layer.use_true_gradient = True
    try:
        yield
    finally:
        for layer in layers:
            layer.use_true_gradient = False
