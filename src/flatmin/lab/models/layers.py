"""What the models written here share: a convolution, the option-A shortcut and the start of the weights."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def conv3x3(in_channels: int, channels: int, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """Return a 3x3 convolution that keeps the size (divided by the stride)."""
    return nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=bias)


def three_groups(
    in_channels: int, widths: Sequence[int], num_blocks: int, block: Callable[[int, int, int], nn.Module]
) -> nn.Sequential:
    """Return the blocks of three groups, made from (in_channels, channels, stride); all groups but the first halve."""
    blocks: list[nn.Module] = []
    for group, channels in enumerate(widths):
        for i in range(num_blocks):
            blocks.append(block(in_channels, channels, 2 if group > 0 and i == 0 else 1))
            in_channels = channels
    return nn.Sequential(*blocks)


def initialize(network: nn.Module) -> None:
    """Start as He et al. (2015): convolutions normal with variance 2 / fan_out, biases 0, norms 1 and 0.

    The last layer keeps torch's uniform start, with a bias of 0.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


def start_head_uniform(head: nn.Linear) -> None:
    """Start the last layer as the reference code does: weights U(-1/sqrt(classes), 1/sqrt(classes)).

    It says that torch's usual start, whose range is 1/sqrt(inputs), costs about 0.5 % on CIFAR-100.
    """
    bound = head.out_features**-0.5
    nn.init.uniform_(head.weight, -bound, bound)


def pad_channels(x: Tensor, channels: int) -> Tensor:
    """Return x (N, c, H, W) with zero channels behind, ``channels`` in all."""
    return F.pad(x, (0, 0, 0, 0, 0, channels - x.shape[1])) if channels > x.shape[1] else x
