"""A small transformer that predicts the next character of a text from the characters before it."""

import torch
from torch import Tensor, nn

from flatmin.lab.models.vision_transformer import Block

CONTEXT = 64
"""Characters that it sees; the dataset has them as images of 8 x 8 pixels."""


class CharTransformer(nn.Module):
    """`depth` blocks of attention and MLP on 64 characters, of which the last one's output is the prediction."""

    def __init__(self, depth: int, width: int, *, num_classes: int, in_channels: int = 1) -> None:
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
        logits: Tensor = self.head(self.norm(self.blocks(tokens)[:, -1]))
        return logits
