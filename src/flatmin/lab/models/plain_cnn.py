"""A small model for the demo: three 3x3 convolutions without normalization."""

import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize


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
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return logits
