"""AutoAugment (Cubuk et al., 2019) on whole batches of uint8 images.

torchvision has the three policies and the sixteen operations; what is here is the order of work. A policy has
25 pairs of operations with fixed strengths, and each image draws one pair. So the images of a batch that drew
the same operation are taken together, and a batch costs some fifty calls instead of two for each image.
"""

import math
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from flatmin.lab.data.augment import Draw, to_device
from flatmin.lab.data.randomness import Purpose
from flatmin.lab.data.torchvision_operators import torchvision

tv: Any = torchvision.transforms.functional  # untyped

PolicyName = Literal["cifar10", "svhn", "imagenet"]

NUM_LEVELS = 10
SIGNED = {
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
}


def auto_augment(images: Tensor, draw: Draw, policy: PolicyName) -> Tensor:
    """Return each image after the two operations of a random pair, each done with its probability.

    Args:
        images: uint8, (N, 1 or 3, H, W).
        draw: the keys of the images.
        policy: for which dataset the policy was learned.

    Returns:
        New uint8 images of the same shape.
    """
    pairs = policy_pairs(policy)
    chosen = draw.integers(len(pairs), Purpose.POLICY)
    images = images.clone()
    for stage in range(2):
        applied = draw.uniform(Purpose.POLICY_APPLIED, stage)
        negative = draw.integers(2, Purpose.POLICY_SIGN, stage).bool()
        # Images with the same operation, strength and sign form a group, whatever pair it came from.
        groups: dict[tuple[str, float], list[Tensor]] = {}
        for number, pair in enumerate(pairs):
            operation, probability, level = pair[stage]
            takes = (chosen == number) & (applied < probability)
            strength = _strength(operation, level, images.shape[-2:])
            for sign in (-1, 1) if operation in SIGNED else (1,):
                mask = takes & (negative == (sign < 0)) if operation in SIGNED else takes
                if mask.any():
                    groups.setdefault((operation, sign * strength), []).append(mask)
        members = [torch.stack(masks).any(0).nonzero().squeeze(1) for masks in groups.values()]
        if members:
            everyone = to_device(torch.cat(members), images.device)  # one copy for all groups
            for (operation, strength), index in zip(
                groups, torch.split(everyone, [len(m) for m in members]), strict=True
            ):
                images[index] = apply_operation(images[index], operation, strength)
    return images


@cache
def policy_pairs(
    policy: PolicyName,
) -> list[tuple[tuple[str, float, int | None], tuple[str, float, int | None]]]:
    """Return the 25 pairs of (operation, probability, level or None) of a policy."""
    transforms = torchvision.transforms
    return list(transforms.AutoAugment(transforms.AutoAugmentPolicy(policy)).policies)


def apply_operation(images: Tensor, operation: str, strength: float) -> Tensor:
    """Return images (N, C, H, W) after one operation, with its signed strength in its own unit."""
    result: Tensor
    match operation:
        case "ShearX" | "ShearY":
            # The strength is the slope itself; torchvision takes the angle.
            angle = math.degrees(math.atan(strength))
            shear = [angle, 0.0] if operation == "ShearX" else [0.0, angle]
            result = tv.affine(images, angle=0.0, translate=[0, 0], scale=1.0, shear=shear, center=[0, 0])
        case "TranslateX":
            result = tv.affine(images, angle=0.0, translate=[int(strength), 0], scale=1.0, shear=[0.0, 0.0])
        case "TranslateY":
            result = tv.affine(images, angle=0.0, translate=[0, int(strength)], scale=1.0, shear=[0.0, 0.0])
        case "Rotate":
            result = tv.rotate(images, strength)
        case "Brightness":
            result = tv.adjust_brightness(images, 1 + strength)
        case "Color":
            result = tv.adjust_saturation(images, 1 + strength)
        case "Contrast":
            result = tv.adjust_contrast(images, 1 + strength)
        case "Sharpness":
            result = tv.adjust_sharpness(images, 1 + strength)
        case "Posterize":
            result = tv.posterize(images, int(strength))
        case "Solarize":
            result = tv.solarize(images, strength)
        case "AutoContrast":
            result = tv.autocontrast(images)
        case "Equalize":
            result = tv.equalize(images)
        case "Invert":
            result = tv.invert(images)
        case _:
            raise ValueError(f"AutoAugment has no operation {operation!r}.")
    return result


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
