"""ResNets for small images (He et al., 2016, Section 4.2) and Wide ResNets (Zagoruyko and Komodakis, 2016).

The former also without residual connections (Figure 1), the latter also without batch norm.
"""

from functools import partial
from typing import Literal

import torch
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

    def __init__(self, depth: int, *, num_classes: int, in_channels: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(in_channels, 16), nn.BatchNorm2d(16)
        self.blocks = three_groups(16, (16, 32, 64), (depth - 2) // 6, partial(BasicBlock, shortcut=shortcut))
        self.head = nn.Linear(64, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        features = self.blocks(F.relu(self.norm1(self.conv1(x))))
        return self.head(features.mean((2, 3)))


class WideBlock(nn.Module):
    """Norm, ReLU, convolution, twice, on top of the identity (or a 1x1 convolution where the shape changes).

    Without batch norm the convolutions have biases, and the residual branch is multiplied by a learned scalar that
    starts at 0 (SkipInit: De and Smith, 2020), so every block starts as its shortcut. A pooled shortcut is average
    pooling and zero channels where the shape changes.
    """

    activate_first = False
    """Whether norm and ReLU come before the shortcut branches off."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, *, batch_norm: bool, pooled_shortcut: bool
    ) -> None:
        super().__init__()
        self.stride, self.channels = stride, channels
        self.norm1 = nn.BatchNorm2d(in_channels) if batch_norm else nn.Identity()
        self.conv1 = conv3x3(in_channels, channels, stride, bias=not batch_norm)
        self.norm2 = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.conv2 = conv3x3(channels, channels, bias=not batch_norm)
        self.shortcut: nn.Module | None = None
        if (stride != 1 or in_channels != channels) and not pooled_shortcut:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        self.residual_scale = None if batch_norm else nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        activated = F.relu(self.norm1(x))
        residual = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        if self.residual_scale is not None:
            residual = residual * self.residual_scale
        if self.shortcut is not None:
            return residual + self.shortcut(activated)
        start = activated if self.activate_first else x
        pooled = F.avg_pool2d(start, self.stride, ceil_mode=True) if self.stride > 1 else start
        return residual + pad_channels(pooled, self.channels)


class WideResNet(nn.Module):
    """WRN-depth-width: three groups of (depth - 4) / 6 blocks with 16, 32 and 64 times ``width`` channels.

    Without batch norm it is the model of the paper's Hessian figure. The paper does not say how that was started; this
    one starts as in SkipInit with Fixup's factors, which is ours. With ``reference`` it has the shortcuts of the
    paper's reference code: pooled, and the first block activates before its shortcut branches off.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        *,
        num_classes: int,
        in_channels: int,
        batch_norm: bool,
        reference: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, 16, bias=not batch_norm)
        block = partial(WideBlock, batch_norm=batch_norm, pooled_shortcut=reference)
        self.blocks = three_groups(16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6, block)
        self.blocks[0].activate_first = reference  # type: ignore[assignment]
        channels = 64 * width
        self.norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)
        initialize(self)
        if not batch_norm:
            self._start_without_norm()

    @torch.no_grad()
    def _start_without_norm(self) -> None:
        """Start where neither activations nor gradients grow with the depth, once the scalars leave 0.

        The variance of activations is kept on the way forward (fan_in), and with L blocks both convolutions of a branch
        are multiplied by L^(-1/2), as Fixup does with its first one (Zhang et al., 2019): without that, a WRN-40
        diverges at the learning rates it is usually trained with.
        """
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
        for layer in self.modules():
            if isinstance(layer, WideBlock):
                layer.conv1.weight.mul_(len(self.blocks) ** -0.5)
                layer.conv2.weight.mul_(len(self.blocks) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        features = F.relu(self.norm(self.blocks(self.conv1(x))))
        return self.head(self.dropout(features.mean((2, 3))))
