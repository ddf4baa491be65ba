"""The model that the benchmarks run."""

from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inner, outer, stride, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=not norm), layer_norm(outer, norm)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=not norm), layer_norm(outer, norm)
        self.short = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def layer_norm(width, norm):
    return nn.BatchNorm2d(width) if norm else nn.Identity()


def resnet20(norm=True):
    """ResNet-20 for 32 x 32 images, 272,282 weights with batch norm."""
    layers, inner = [nn.Conv2d(3, 16, 3, 1, 1, bias=not norm), layer_norm(16, norm), nn.ReLU()], 16
    for stage, outer in enumerate((16, 32, 64)):
        for block in range(3):
            layers.append(Block(inner, outer, 2 if stage and not block else 1, norm))
            inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
