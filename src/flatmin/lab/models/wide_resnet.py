"""Wide ResNets for small images (Zagoruyko and Komodakis, 2016), with batch norm or without."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.models.layers import conv3x3, initialize, pad_channels, three_groups


class WideBlock(nn.Module):
    """Norm, ReLU, convolution, twice, on top of the identity (or a 1x1 convolution where the shape changes).

    Without batch norm the convolutions have biases, and the residual branch is multiplied by a learned scalar that
    starts at 0 (SkipInit: De and Smith, 2020), so every block starts as its shortcut. A pooled shortcut is average
    pooling and zero channels where the shape changes.
    """

    activate_first = False
    """Whether norm and ReLU come before the shortcut branches off."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, *, batch_norm: bool, pooled_shortcut: bool = False
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
        in_channels: int = 3,
        batch_norm: bool = True,
        reference: bool = False,
        dropout: float = 0.0,
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
