"""A multilayer perceptron, for tables: no convolutions, no normalization."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 8
"""Images are averaged to 8 x 8 pixels; of the digits these are the 64 columns of their table."""


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
        logits: Tensor = self.head(x)
        return logits
