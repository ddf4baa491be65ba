r"""PyramidNets (Han et al., 2017) of bottleneck blocks, with and without ShakeDrop (Yamada et al., 2019).

The channels grow by :math:`\alpha / n` in each of the n blocks, starting from 16, and are rounded to whole
numbers.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize, pad_channels
from flatmin.lab.models.shake import ShakeDrop

EXPANSION = 4
LAST_SURVIVAL = 0.5


class PyramidBlock(nn.Module):
    """Norm, 1x1, norm, ReLU, 3x3, norm, ReLU, 1x1, norm, [ShakeDrop], on top of a zero-padded shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, survival: float | None) -> None:
        super().__init__()
        self.out_channels, self.stride = EXPANSION * channels, stride
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = conv3x3(channels, channels, stride)
        self.norm3 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, self.out_channels, 1, bias=False)
        self.norm4 = nn.BatchNorm2d(self.out_channels)
        self.drop = nn.Identity() if survival is None else ShakeDrop(survival)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out: Tensor = self.conv1(self.norm1(x))
        out = self.conv2(F.relu(self.norm2(out)))
        out = self.norm4(self.conv3(F.relu(self.norm3(out))))
        shortcut = F.avg_pool2d(x, 2, ceil_mode=True) if self.stride == 2 else x
        return self.drop(out) + pad_channels(shortcut, self.out_channels)


def block_widths(num_blocks: int, alpha: int) -> list[int]:
    r"""Return the bottleneck width of each block, :math:`round(16 + \alpha k / n)` for k = 1 .. n.

    Example:
        >>> block_widths(4, 10)
        [19, 21, 24, 26]
    """
    # Half a channel rounds up (Python's round would take the even neighbor).
    return [int(16 + alpha * k / num_blocks + 0.5) for k in range(1, num_blocks + 1)]


def survival_probabilities(num_blocks: int) -> list[float]:
    r"""Return ShakeDrop's p of each block, :math:`1 - (1 - p_L) l / L` (Yamada et al., linear decay)."""
    return [1 - (1 - LAST_SURVIVAL) * block / num_blocks for block in range(1, num_blocks + 1)]


class PyramidNet(nn.Module):
    """Depth 9 n + 2: three groups of n bottleneck blocks whose widths grow from 16 to 16 + alpha."""

    def __init__(self, depth: int, alpha: int, *, num_classes: int, in_channels: int, shakedrop: bool) -> None:
        super().__init__()
        per_group = (depth - 2) // 9
        widths = block_widths(3 * per_group, alpha)
        survival = survival_probabilities(len(widths))
        self.conv1, self.norm1 = conv3x3(in_channels, 16), nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        channels = 16
        for i, width in enumerate(widths):
            stride = 2 if i in (per_group, 2 * per_group) else 1
            blocks.append(PyramidBlock(channels, width, stride, survival[i] if shakedrop else None))
            channels = EXPANSION * width
        self.blocks = nn.Sequential(*blocks)
        self.norm2 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        features = F.relu(self.norm2(self.blocks(self.norm1(self.conv1(x)))))
        return self.head(features.mean((2, 3)))
