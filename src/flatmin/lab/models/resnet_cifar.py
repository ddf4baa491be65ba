"""ResNets for small images (He et al., 2016, Section 4.2), also without residual connections (Figure 1)."""

from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize, pad_channels, three_groups

Shortcut = Literal["identity", "projection", "none"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut around them.

    Where the shape changes, ``identity`` takes every other pixel and fills up with zero channels (option A),
    ``projection`` is a 1x1 convolution with batch norm (option B); ``none`` leaves the shortcut out everywhere.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(in_channels, channels, stride), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = conv3x3(channels, channels), nn.BatchNorm2d(channels)
        self.stride, self.channels, self.kind = stride, channels, shortcut
        self.projection: nn.Module | None = None
        if shortcut == "projection" and (stride != 1 or in_channels != channels):
            conv = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.projection = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.kind == "none":
            return F.relu(out)
        if self.projection is not None:
            return F.relu(out + self.projection(x))
        return F.relu(out + pad_channels(x[:, :, :: self.stride, :: self.stride], self.channels))


class ResNetCifar(nn.Module):
    """ResNet of depth 6 n + 2: three groups of n blocks with 16, 32 and 64 channels."""

    def __init__(self, depth: int, *, num_classes: int, in_channels: int = 3, shortcut: Shortcut = "identity") -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(in_channels, 16), nn.BatchNorm2d(16)
        self.blocks = three_groups(16, (16, 32, 64), (depth - 2) // 6, partial(BasicBlock, shortcut=shortcut))
        self.head = nn.Linear(64, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        features = self.blocks(F.relu(self.norm1(self.conv1(x))))
        return self.head(features.mean((2, 3)))
