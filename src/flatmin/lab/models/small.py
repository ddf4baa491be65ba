"""Small models without normalization over batches: a CNN for the demo, a perceptron for tables, and transformers.

The transformer for images has the plain design of Beyer, Zhai and Kolesnikov (2022): fixed sine and cosine positions,
no class token, the mean over all patches before the last layer. So it takes images of any size that the patches divide.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.lab.errors import ModelError
from flatmin.lab.models.layers import conv3x3, initialize

SIDE = 8
"""For the perceptron, images are averaged to 8 x 8 pixels; of the digits these are the 64 columns of their table."""
HEAD_WIDTH = 32
CONTEXT = 64
"""Characters that the transformer for text sees; the dataset has them as images of 8 x 8 pixels."""


class PlainCNN(nn.Module):
    """Convolutions with width, 2 width, 4 width channels at 1, 1/2, 1/4 of the size; means of quarters; linear."""

    def __init__(self, width: int, *, num_classes: int, in_channels: int) -> None:
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

    def __init__(self, depth: int, width: int, *, num_classes: int, in_channels: int) -> None:
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


class VisionTransformer(nn.Module):
    """`depth` blocks of attention and MLP on patches of `patch_size` x `patch_size` pixels."""

    def __init__(self, depth: int, width: int, patch_size: int, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        patch_size = self.patches.stride[0]
        if x.shape[-1] % patch_size or x.shape[-2] % patch_size:
            raise ModelError(
                f"Patches of {patch_size} x {patch_size} pixels do not divide images of {x.shape[-2]} x {x.shape[-1]}. "
                "Choose another model.name or data.image_size."
            )
        x = self.patches(x)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        x = x + positions(height, width, x.shape[-1]).to(x)
        return self.head(self.norm(self.blocks(x)).mean(1))


class CharTransformer(nn.Module):
    """`depth` blocks of attention and MLP on 64 characters, of which the last one's output is the prediction."""

    def __init__(self, depth: int, width: int, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_classes, width)
        self.position = nn.Parameter(torch.empty(CONTEXT * in_channels, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for weight in (self.embed.weight, self.position):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of texts (N, 1, 8, 8), whose values are the codes of characters."""
        tokens = self.embed(x.flatten(1).round().long()) + self.position
        return self.head(self.norm(self.blocks(tokens)[:, -1]))


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (N, T, width) of tokens (N, T, width)."""
        x = x + self._attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, -1, HEAD_WIDTH))  # N, T, 3, heads, HEAD_WIDTH
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Written out, because the fused kernels have no second derivatives, which the measures need.
        attention = F.softmax(query @ key.transpose(-2, -1) / math.sqrt(HEAD_WIDTH), dim=-1)
        return self.projection((attention @ value).transpose(1, 2).flatten(2))


def positions(height: int, width: int, size: int) -> Tensor:
    """Return sines and cosines of the coordinates of a grid, as (height * width, size)."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, size // 4)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [coordinate.flatten()[:, None] * frequencies for coordinate in (x, y)]
    return torch.cat([function(angle) for angle in angles for function in (torch.sin, torch.cos)], dim=1)
