"""Augmentation of whole batches, as pure functions of images and keys (seed, epoch, example).

Images are uint8 tensors (N, C, H, W) until `normalize` makes floats of them. What the functions draw depends
neither on the batch an example is in nor on its place there, so a resumed or re-sharded run sees the same
images.
"""

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
    """The run's seed."""
    epoch: int
    """The pass over the data."""
    examples: NDArray[np.int64]
    """The number of each image in its dataset."""

    def integers(self, below: int, purpose: Purpose, *keys: int) -> Tensor:
        """Return an integer in [0, below) for each image."""
        return torch.from_numpy(integers(below, self.seed, purpose, self.epoch, *keys, self.examples))

    def on_device(self, device: torch.device, *wanted: tuple[int, Purpose]) -> list[Tensor]:
        """Return several times an integer in [0, below) for each image, given (below, purpose), with one copy."""
        return list(to_device(torch.stack([self.integers(below, purpose) for below, purpose in wanted]), device))

    def uniform(self, purpose: Purpose, *keys: int) -> Tensor:
        """Return a number in [0, 1) for each image, float64."""
        return torch.from_numpy(uniform(self.seed, purpose, self.epoch, *keys, self.examples))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; to a GPU from pinned memory, so that the host need not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def flip_and_crop(images: Tensor, draw: Draw, padding: int = PADDING) -> Tensor:
    """Mirror each image with probability 1/2, pad with black, cut out its size at a random place.

    This is the paper's basic augmentation (Section 3.1).
    """
    height, width = images.shape[-2:]
    places = 2 * padding + 1
    flips, rows, columns = draw.on_device(
        images.device, (2, Purpose.FLIP), (places, Purpose.CROP_ROW), (places, Purpose.CROP_COLUMN)
    )
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


def cutout(images: Tensor, draw: Draw, size: int, *, shared: bool = False) -> Tensor:
    """Replace a square of each normalized image by the mean color (0), in place (DeVries and Taylor, 2017).

    The square's center is uniform over the pixels, so that it may lie partly outside.

    Args:
        images: normalized, float.
        draw: the keys of the images.
        size: side of the square in pixels.
        shared: one place for the whole batch, that of its first image, as in the reference code.

    Returns:
        ``images``.
    """
    height, width = images.shape[-2:]
    center_rows, center_columns = draw.on_device(
        images.device, (height, Purpose.CUTOUT_ROW), (width, Purpose.CUTOUT_COLUMN)
    )
    if shared:
        center_rows, center_columns = (c[:1].expand(len(images)) for c in (center_rows, center_columns))
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
