"""Plain networks, without normalization or shortcuts: a small CNN for the demo, and a perceptron for tables."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize

SIDE = 8
"""Images are averaged to 8 x 8 pixels; of the digits these are the 64 columns of their table."""


class PlainCNN(nn.Module):
    """Convolutions with width, 2 width, 4 width channels at 1, 1/2, 1/4 of the size; means of quarters; linear."""

    def __init__(self, width: int, *, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, width, bias=True)
        self.conv2 = conv3x3(width, 2 * width, stride=2, bias=True)
        self.conv3 = conv3x3(2 * width, 4 * width, stride=2, bias=True)
        self.head = nn.Linear(16 * width, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


class MLP(nn.Module):
    """`depth` hidden layers of `width` units with ReLU."""

    def __init__(self, depth: int, width: int, *, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        sizes = [SIDE * SIDE * in_channels, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        x = F.adaptive_avg_pool2d(x, SIDE).flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)
