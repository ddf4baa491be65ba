r"""Shake-Shake networks (Gastaldi, 2017), and the random coefficients of both Shake-Shake and ShakeDrop.

ShakeDrop (Yamada et al., 2019) is used by PyramidNets.

Both multiply a branch by one random coefficient on the way forward and by another on the way back, drawn again
for each image. The result is not a gradient of anything, so SAM's first pass, whose gradient decides where w +
eps lies, uses the same coefficient on both ways ("true gradient"), as the reference implementation did:
:func:`true_gradient`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize, three_groups


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
        return ForwardBackwardScale.apply(x, *factors)  # type: ignore[no-untyped-call]


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


class ShakeShortcut(nn.Module):
    """The input and its shift by one pixel, at every other pixel, through 1x1 convolutions and norm.

    In the reference code there is no ReLU before them, and the shift is also there at stride 1.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, *, reference: bool = False) -> None:
        super().__init__()
        self.stride, self.reference = stride, reference
        self.conv1 = nn.Conv2d(in_channels, channels // 2, 1, bias=False)
        self.conv2 = nn.Conv2d(in_channels, channels - channels // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut's output."""
        x = x if self.reference else F.relu(x)
        # The second path sees the input one pixel further: no pixel is lost.
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1)) if self.stride > 1 or self.reference else x
        first = self.conv1(x[:, :, :: self.stride, :: self.stride])
        second = self.conv2(shifted[:, :, :: self.stride, :: self.stride])
        return self.norm(torch.cat([first, second], dim=1))


class ShakeBlock(nn.Module):
    """Two branches of ReLU, convolution, norm, ReLU, convolution, norm, mixed, on top of the shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, *, reference: bool) -> None:
        super().__init__()
        self.branch1 = self._branch(in_channels, channels, stride)
        self.branch2 = self._branch(in_channels, channels, stride)
        self.shake = ShakeShake()
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.shortcut = ShakeShortcut(in_channels, channels, stride, reference=reference)

    @staticmethod
    def _branch(in_channels: int, channels: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.ReLU(),
            conv3x3(in_channels, channels, stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            conv3x3(channels, channels),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        mixed = self.shake(self.branch1(x), self.branch2(x))
        return mixed + (x if self.shortcut is None else self.shortcut(x))


class ShakeShakeNet(nn.Module):
    """Depth 6 n + 2 ("26 2x96d"): three groups of n blocks with width, 2 width and 4 width channels."""

    def __init__(self, depth: int, width: int, *, num_classes: int, in_channels: int, reference: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(in_channels, 16), nn.BatchNorm2d(16)
        widths, block = (width, 2 * width, 4 * width), partial(ShakeBlock, reference=reference)
        self.blocks = three_groups(16, widths, (depth - 2) // 6, block)
        self.head = nn.Linear(widths[-1], num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        features = F.relu(self.blocks(self.norm1(self.conv1(x))))
        return self.head(features.mean((2, 3)))
