"""Shake-Shake models: ResNets with two residual branches that are mixed at random (Gastaldi, 2017)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize, three_groups
from flatmin.lab.models.shake import ShakeShake


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
        out: Tensor = self.norm(torch.cat([first, second], dim=1))
        return out


class ShakeBlock(nn.Module):
    """Two branches of ReLU, convolution, norm, ReLU, convolution, norm, mixed, on top of the shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, *, reference: bool = False) -> None:
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
        out: Tensor = mixed + (x if self.shortcut is None else self.shortcut(x))
        return out


class ShakeShakeNet(nn.Module):
    """Depth 6 n + 2 ("26 2x96d"): three groups of n blocks with width, 2 width and 4 width channels."""

    def __init__(
        self, depth: int, width: int, *, num_classes: int, in_channels: int = 3, reference: bool = False
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(in_channels, 16), nn.BatchNorm2d(16)
        widths, block = (width, 2 * width, 4 * width), partial(ShakeBlock, reference=reference)
        self.blocks = three_groups(16, widths, (depth - 2) // 6, block)
        self.head = nn.Linear(widths[-1], num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        features = F.relu(self.blocks(self.norm1(self.conv1(x))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits
