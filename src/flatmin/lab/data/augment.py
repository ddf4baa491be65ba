"""Augmentation of whole batches, as pure functions of images and of integers drawn from keys (seed, epoch, example).

Images are uint8 tensors (N, C, H, W) until `normalize` makes floats of them. What is drawn depends neither on
the batch an example is in nor on its place there, so a resumed or re-sharded run sees the same images. It is drawn
on the host, and goes to the device together with the images (`copy_together`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flatmin.lab.data.randomness import Purpose, integers, uniform

PADDING = 4  # Section 3.1: "padding by four pixels"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The keys from which the random numbers of a batch are made."""

    seed: int
    epoch: int
    examples: NDArray[np.int64]
    """The number of each image in its dataset."""

    def integers(self, below: int, purpose: Purpose, *keys: int) -> Tensor:
        """Return an integer in [0, below) for each image."""
        return torch.from_numpy(integers(below, self.seed, purpose, self.epoch, *keys, self.examples))

    def uniform(self, purpose: Purpose, *keys: int) -> Tensor:
        """Return a number in [0, 1) for each image, float64."""
        return torch.from_numpy(uniform(self.seed, purpose, self.epoch, *keys, self.examples))


def copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of the host to a device in one piece; to a GPU from pinned memory, without waiting."""
    if device.type == "cpu":
        return list(tensors)
    # Wide numbers first: each tensor must begin at a multiple of its element size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    parts = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in order]
    piece = torch.empty(sum(map(len, parts)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    moved = torch.split(torch.cat(parts, out=piece).to(device, non_blocking=True), [len(part) for part in parts])
    found = {i: part.view(tensors[i].dtype).view(tensors[i].shape) for i, part in zip(order, moved, strict=True)}
    return [found[i] for i in range(len(tensors))]


def draw_crops(draw: Draw, padding: int = PADDING) -> Tensor:
    """Return for each image whether it is mirrored, and the row and the column where it is cut out: (3, N)."""
    places = 2 * padding + 1
    wanted = ((2, Purpose.FLIP), (places, Purpose.CROP_ROW), (places, Purpose.CROP_COLUMN))
    return torch.stack([draw.integers(below, purpose) for below, purpose in wanted])


def flip_and_crop(images: Tensor, crops: Tensor, padding: int = PADDING) -> Tensor:
    """Mirror each image with probability 1/2, pad with black, cut out its size at a random place.

    This is the paper's basic augmentation (Section 3.1). What is random comes from `draw_crops`.
    """
    height, width = images.shape[-2:]
    flips, rows, columns = crops
    flipped = torch.where(flips.bool()[:, None, None, None], images.flip(-1), images)
    padded = F.pad(flipped, (padding,) * 4)
    # All windows of all images as a view (N, C, 2p + 1, 2p + 1, H, W); one of each is copied.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, rows, columns]


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return uint8 images as float32 with (x / 255 - mean) / std in each channel, channels-last in memory."""
    scale, shift = _scale_and_shift(mean, std, images.device)
    return images.contiguous(memory_format=torch.channels_last).float().mul_(scale).add_(shift)


@lru_cache(maxsize=8)
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
    shift = -torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)
    return scale.float().to(device)[:, None, None], shift.float().to(device)[:, None, None]


def draw_cutouts(draw: Draw, height: int, width: int, *, shared: bool = False) -> Tensor:
    """Return the row and the column of the center of each image's square, uniform over the pixels: (2, N).

    ``shared``: the whole batch has its first image's place, as in the reference code.
    """
    wanted = ((height, Purpose.CUTOUT_ROW), (width, Purpose.CUTOUT_COLUMN))
    centers = torch.stack([draw.integers(below, purpose) for below, purpose in wanted])
    return centers[:, :1].expand_as(centers) if shared else centers


def cutout(images: Tensor, centers: Tensor, size: int) -> Tensor:
    """Replace a square of each normalized image by the mean color (0), in place (DeVries and Taylor, 2017).

    ``size`` is its side in pixels; a square may lie partly outside.
    """
    height, width = images.shape[-2:]
    center_rows, center_columns = centers
    inside_rows = _covered(center_rows, height, size)[:, None, :, None]
    inside_columns = _covered(center_columns, width, size)[:, None, None, :]
    return images.masked_fill_(inside_rows & inside_columns, 0.0)


def resize(images: Tensor, size: int, mode: str = "bilinear") -> Tensor:
    """Return float images (N, C, H, W) at size x size pixels, bilinear or bicubic, smoothed where they shrink."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode=mode, align_corners=False, antialias=True)


def mixup_weight(alpha: float, seed: int, epoch: int, batch: int) -> float:
    r"""Return a batch's :math:`\lambda \sim \mathrm{Beta}(\alpha, \alpha)` (Zhang et al., 2018).

    As in the authors' code, one weight is shared by the batch. It is 1 (nothing is mixed) for alpha 0.
    """
    if alpha == 0:
        return 1.0
    from scipy.special import betaincinv

    return float(betaincinv(alpha, alpha, uniform(seed, Purpose.MIXUP_WEIGHT, epoch, batch)))


def _covered(centers: Tensor, length: int, size: int) -> Tensor:
    # Pixels center - size // 2 .. center - size // 2 + size - 1, as a mask (N, length).
    offsets = torch.arange(length, device=centers.device)[None, :] - (centers[:, None] - size // 2)
    return (offsets >= 0) & (offsets < size)
