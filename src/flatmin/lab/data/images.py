"""Where images come from: an array in memory, or files that are decoded when their turn comes."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from flatmin.lab.data.augment import Draw
from flatmin.lab.data.randomness import Purpose
from flatmin.lab.errors import DataError

CROP_FRACTION = 224 / 256  # of the shorter side: what is usually evaluated on ImageNet
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
AREA_RANGE = (0.08, 1.0)  # of the random resized crop
RATIO_RANGE = (3 / 4, 4 / 3)
CROP_TRIES = 10
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, kw_only=True)
class MemoryImages:
    """All images as one uint8 tensor (N, C, H, W)."""

    pixels: Tensor
    labels: NDArray[np.int64]

    def fetch(self, draw: Draw, *, augment: bool) -> Tensor:
        """Return copies of the images with these numbers; augmentation is done on the batch, later."""
        return self.pixels[torch.from_numpy(draw.examples).to(self.pixels.device)]

    def take(self, indices: NDArray[np.int64], labels: NDArray[np.int64] | None = None) -> "MemoryImages":
        """Return a set of some of the images, with other labels if given."""
        pixels = self.pixels[torch.from_numpy(indices)]
        return MemoryImages(pixels=pixels, labels=self.labels[indices] if labels is None else labels)


@dataclass(frozen=True, kw_only=True)
class FileImages:
    """Image files, decoded to squares of one size by threads (Pillow frees the interpreter's lock)."""

    paths: Sequence[Path]
    labels: NDArray[np.int64]
    size: int
    random_crop: bool
    """Whether an augmented image is a random resized crop; else it is the middle, as for evaluation."""
    resize: str = "bilinear"
    crop_padding: int | None = None
    pool: ThreadPoolExecutor

    def fetch(self, draw: Draw, *, augment: bool) -> Tensor:
        """Return the images with these numbers, each cut and resized to the one size, uint8 (N, C, H, W)."""
        singles = [replace(draw, examples=draw.examples[i : i + 1]) for i in range(len(draw.examples))]
        random_crop = augment and self.random_crop
        arrays = self.pool.map(lambda one: self._decode(one, random_crop), singles)
        return torch.from_numpy(np.stack(list(arrays)))

    def take(self, indices: NDArray[np.int64], labels: NDArray[np.int64] | None = None) -> "FileImages":
        """Return a set of some of the images, with other labels if given."""
        paths = [self.paths[i] for i in indices]
        return replace(self, paths=paths, labels=self.labels[indices] if labels is None else labels)

    def _decode(self, draw: Draw, random_crop: bool) -> NDArray[np.uint8]:
        path = self.paths[int(draw.examples[0])]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:  # Pillow's decoders raise errors of many types over broken files
            raise DataError(
                f"{path} cannot be read as an image: {error}. It is corrupt or incomplete: fetch it again, "
                "or remove it from the dataset. Nothing was trained on it."
            ) from error
        box: Box | None
        if random_crop:
            numbers = [float(draw.uniform(Purpose.RESIZED_CROP, k)[0]) for k in range(4 * CROP_TRIES)]
            box = random_crop_box(image.width, image.height, numbers)
        elif self.crop_padding is None:
            box = middle_box(image.width, image.height)
        else:
            box = padded_middle_box(image.width, image.height, self.size, self.crop_padding)
        if self.crop_padding is not None:  # the reference code crops first: no pixel outside of the box takes part
            image, box = image.crop(box), None
        image = image.resize((self.size, self.size), FILTERS[self.resize], box=box)
        if random_crop and draw.integers(2, Purpose.FLIP)[0]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image).transpose(2, 0, 1)


Images = MemoryImages | FileImages
"""A numbered set of images and their classes."""


def middle_box(width: int, height: int) -> Box:
    """Return the box (left, top, right, bottom) that is evaluated: the middle, 224/256 of the shorter side.

    Cutting before resizing is the same as resizing the shorter side to 256 and cutting 224 out of the middle,
    and cheaper.

    Example:
        >>> middle_box(512, 256)
        (144.0, 16.0, 368.0, 240.0)
    """
    side = CROP_FRACTION * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def padded_middle_box(width: int, height: int, size: int, padding: int) -> Box:
    """Return the box that the reference code evaluates: the middle, size / (size + padding) of the shorter side.

    Its sides are cut down to whole pixels, as there.

    Example:
        >>> padded_middle_box(500, 375, size=224, padding=32)
        (86, 24, 414, 352)
        >>> padded_middle_box(500, 375, size=600, padding=32)
        (72, 10, 428, 366)
    """
    side = size * min(width, height) // (size + padding)
    left, top = (width - side + 1) // 2, (height - side + 1) // 2
    return (left, top, left + side, top + side)


def random_crop_box(width: int, height: int, numbers: Sequence[float]) -> Box:
    """Return a random box of 8 to 100 % of the area and a ratio of 3/4 to 4/3 (Szegedy et al., 2015).

    It takes four uniform numbers for each of ten tries: area, logarithm of the ratio, left, top. If no try fits into
    the image, it is the largest middle box with an allowed ratio.
    """
    low, high = (math.log(r) for r in RATIO_RANGE)
    for t in range(CROP_TRIES):
        area_part, ratio_part, left_part, top_part = numbers[4 * t : 4 * t + 4]
        area = width * height * (AREA_RANGE[0] + (AREA_RANGE[1] - AREA_RANGE[0]) * area_part)
        ratio = math.exp(low + (high - low) * ratio_part)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(left_part * (width - w + 1)), int(top_part * (height - h + 1))
            return (left, top, left + w, top + h)
    w = min(width, round(height * RATIO_RANGE[1]))
    h = min(height, round(width / RATIO_RANGE[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h)
