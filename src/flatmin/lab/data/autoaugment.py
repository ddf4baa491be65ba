"""AutoAugment (Cubuk et al., 2019) on whole batches of uint8 images.

torchvision has the three policies and the sixteen operations; this module only batches them. A policy has
25 pairs of operations with fixed strengths, and each image draws one pair. So the images of a batch that drew
the same operation with the same sign are taken together, and a batch costs some fifty calls instead of two for each
image.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatmin.lab.data.augment import Draw
from flatmin.lab.data.randomness import Purpose
from flatmin.lab.data.torchvision_operators import torchvision

tv: Any = torchvision.transforms.functional  # untyped

PolicyName = Literal["cifar10", "svhn", "imagenet"]

NUM_LEVELS = 10
SIGNED = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness"}


class Group(NamedTuple):
    """Images of a batch that undergo the same operation."""

    operation: str
    strength: float
    """Signed, in the operation's own unit."""
    size: int


def draw_operations(draw: Draw, policy: PolicyName, size: torch.Size) -> tuple[list[Group], Tensor]:
    """Draw a pair of operations for each image, and whether each of the two is done, with its probability.

    Returns the groups of the first stage, then of the second, and the numbers of their images, group after group.
    """
    chosen = draw.integers(len(policy_pairs(policy)), Purpose.POLICY)
    groups: list[Group] = []
    members: list[Tensor] = []
    for stage in range(2):
        kinds, kind_of, probabilities = _stage(policy, stage, size)
        negative = draw.integers(2, Purpose.POLICY_SIGN, stage)
        is_done = draw.uniform(Purpose.POLICY_APPLIED, stage) < probabilities[chosen]
        drawn = torch.where(is_done, kind_of[chosen, negative], len(kinds))
        sizes = torch.bincount(drawn, minlength=len(kinds))[: len(kinds)].tolist()
        members.append(drawn.argsort(stable=True)[: sum(sizes)])
        groups += [Group(*kind, number) for kind, number in zip(kinds, sizes, strict=True) if number]
    return groups, torch.cat(members)


@cache
def _stage(policy: PolicyName, stage: int, size: torch.Size) -> tuple[list[tuple[str, float]], Tensor, Tensor]:
    """Return a stage's operations with their signed strengths, which two of them each pair means, and its probability.

    The two differ in their sign, if the operation has one.
    """
    kinds: dict[tuple[str, float], int] = {}
    kind_of, probabilities = [], []
    for pair in policy_pairs(policy):
        operation, probability, level = pair[stage]
        strength = _strength(operation, level, size)
        other = -strength if operation in SIGNED else strength
        kind_of.append([kinds.setdefault((operation, signed), len(kinds)) for signed in (strength, other)])
        probabilities.append(probability)
    return list(kinds), torch.tensor(kind_of), torch.tensor(probabilities, dtype=torch.float64)


def auto_augment(images: Tensor, groups: list[Group], members: Tensor) -> Tensor:
    """Return uint8 images (N, 1 or 3, H, W) after the operations that `draw_operations` drew for them."""
    images = images.clone()
    for group, index in zip(groups, torch.split(members, [group.size for group in groups]), strict=True):
        images[index] = apply_operation(images[index], group.operation, group.strength)
    return images


@cache
def policy_pairs(policy: PolicyName) -> list[tuple[tuple[str, float, int | None], tuple[str, float, int | None]]]:
    """Return the 25 pairs of (operation, probability, level or None) of a policy."""
    transforms = torchvision.transforms
    return list(transforms.AutoAugment(transforms.AutoAugmentPolicy(policy)).policies)


def apply_operation(images: Tensor, operation: str, strength: float) -> Tensor:
    """Return images (N, C, H, W) after one operation, with its signed strength in its own unit."""
    if operation in OF_COLORS:
        return OF_COLORS[operation](images, strength)
    source = _source_pixels(operation, strength, *images.shape[-2:], images.device)
    return F.pad(images.flatten(2), (1, 0))[..., source].view(images.shape)


@cache
def _source_pixels(operation: str, strength: float, height: int, width: int, device: torch.device) -> Tensor:
    """Return where each pixel of a moved image comes from: 0 for black, i + 1 for the image's i-th pixel.

    torchvision, which takes the nearest pixel, moves an image of these numbers. It would send a matrix to the device
    for each group of each batch; this is sent once.
    """
    numbers = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    match operation:
        case "ShearX" | "ShearY":
            # The strength is the slope itself; torchvision takes the angle.
            angle = math.degrees(math.atan(strength))
            shear = [angle, 0.0] if operation == "ShearX" else [0.0, angle]
            moved = tv.affine(numbers, angle=0.0, translate=[0, 0], scale=1.0, shear=shear, center=[0, 0])
        case "TranslateX" | "TranslateY":
            translate = [int(strength), 0] if operation == "TranslateX" else [0, int(strength)]
            moved = tv.affine(numbers, angle=0.0, translate=translate, scale=1.0, shear=[0.0, 0.0])
        case _:
            moved = tv.rotate(numbers, strength)
    return moved.flatten().long().to(device)


def _equalize(images: Tensor) -> Tensor:
    """Return images with flat histograms, as torchvision's `equalize`, which waits for the device for each image."""
    values = images.flatten(2).long()
    histogram = values.new_zeros((*values.shape[:2], 256)).scatter_add_(2, values, torch.ones_like(values))
    others = values.shape[2] - histogram.gather(2, values.amax(2, keepdim=True))  # all pixels but the brightest
    step = others // 255
    table = (histogram.cumsum(2) + step // 2) // step.clamp(min=1)
    table = F.pad(table, (1, 0))[..., :-1].clamp(0, 255)
    equalized = table.gather(2, values).to(torch.uint8).view(images.shape)
    return torch.where((step == 0)[..., None], images, equalized)


OF_COLORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "Brightness": lambda images, strength: tv.adjust_brightness(images, 1 + strength),
    "Color": lambda images, strength: tv.adjust_saturation(images, 1 + strength),
    "Contrast": lambda images, strength: tv.adjust_contrast(images, 1 + strength),
    "Sharpness": lambda images, strength: tv.adjust_sharpness(images, 1 + strength),
    "Posterize": lambda images, strength: tv.posterize(images, int(strength)),
    "Solarize": lambda images, strength: tv.solarize(images, strength),
    "AutoContrast": lambda images, _: tv.autocontrast(images),
    "Equalize": lambda images, _: _equalize(images),
    "Invert": lambda images, _: tv.invert(images),
}
"""The operations that leave every pixel where it is."""


def _strength(operation: str, level: int | None, size: torch.Size) -> float:
    """Return the strength of a level 0 .. 9, in the operation's unit (Cubuk et al., Table 6)."""
    if level is None:
        return 0.0
    part = level / (NUM_LEVELS - 1)
    match operation:
        case "ShearX" | "ShearY":
            return 0.3 * part
        case "TranslateX":
            return 150 / 331 * size[1] * part
        case "TranslateY":
            return 150 / 331 * size[0] * part
        case "Rotate":
            return 30 * part
        case "Posterize":
            return 8 - round(4 * part)
        case "Solarize":
            return 255 * (1 - part)
    return 0.9 * part
