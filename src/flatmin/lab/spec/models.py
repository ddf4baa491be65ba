"""The names of models: which there are, and what the numbers in them mean. Needs neither torch nor timm."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple


class ParsedName(NamedTuple):
    """A model's family and the numbers of its name."""

    family: str
    depth: int = 0
    width: int = 0
    alpha: int = 0
    patch_size: int = 0
    variant: str = ""
    timm_name: str = ""


class Family(NamedTuple):
    """The names of one family: what they look like, and which numbers are allowed."""

    pattern: str
    is_valid: Callable[[ParsedName], bool] = lambda _: True
    allowed: str = ""


FAMILIES = {
    "wrn": Family(
        r"wrn-(?P<depth>\d+)-(?P<width>\d+)",
        lambda name: name.depth >= 10 and (name.depth - 4) % 6 == 0 and name.width >= 1,
        "wrn-DEPTH-WIDTH with DEPTH = 6 n + 4 (10, 16, 22, 28, 40, ...) and WIDTH at least 1",
    ),
    "resnet": Family(r"resnet-(?P<depth>20|32|44|56|110)(?:-(?P<variant>projection|noshort))?"),
    "shake-shake": Family(
        r"shake-shake-(?P<depth>\d+)-2x(?P<width>\d+)d",
        lambda name: name.depth >= 8 and (name.depth - 2) % 6 == 0 and name.width >= 1,
        "shake-shake-DEPTH-2xWIDTHd with DEPTH = 6 n + 2 (8, 14, 20, 26, ...) and WIDTH at least 1",
    ),
    "pyramidnet": Family(
        r"pyramidnet-(?P<depth>\d+)-(?P<alpha>\d+)(?:-(?P<variant>shakedrop))?",
        lambda name: name.depth >= 11 and (name.depth - 2) % 9 == 0 and name.alpha >= 1,
        "pyramidnet-DEPTH-ALPHA with DEPTH = 9 n + 2 (11, 20, 29, ..., 272) and ALPHA at least 1",
    ),
    "cnn": Family(r"cnn-(?P<width>\d+)", lambda name: name.width >= 1, "cnn-WIDTH with WIDTH at least 1"),
    "vit": Family(
        r"vit-(?P<depth>\d+)-(?P<width>\d+)-(?P<patch_size>\d+)",
        lambda name: min(name.depth, name.width, name.patch_size) >= 1 and name.width % 32 == 0,
        "vit-DEPTH-WIDTH-PATCH with DEPTH and PATCH at least 1 and WIDTH a multiple of 32",
    ),
    "mlp": Family(
        r"mlp-(?P<depth>\d+)-(?P<width>\d+)",
        lambda name: min(name.depth, name.width) >= 1,
        "mlp-DEPTH-WIDTH with DEPTH and WIDTH at least 1",
    ),
    "char-transformer": Family(
        r"char-transformer-(?P<depth>\d+)-(?P<width>\d+)",
        lambda name: min(name.depth, name.width) >= 1 and name.width % 32 == 0,
        "char-transformer-DEPTH-WIDTH with DEPTH at least 1 and WIDTH a multiple of 32",
    ),
    "timm": Family(r"timm/(?P<timm_name>[\w.]+)"),
}

SHORT_NAMES_IN_TIMM = {
    "resnet-50": "resnet50",
    "resnet-101": "resnet101",
    "resnet-152": "resnet152",
    "efficientnet-b7": "tf_efficientnet_b7",
    "efficientnet-l2": "tf_efficientnet_l2",
}
"""The paper's ImageNet models in timm (``tf_`` pads as the published weights need it)."""

EXAMPLES = {
    "wrn-28-10": "Wide ResNet (Table 1); also wrn-40-2, wrn-16-2, ...; norm=none is without batch norm",
    "resnet-32": "ResNet for CIFAR: 20, 32, 44, 56, 110 (label noise); -projection: 1x1 shortcuts",
    "resnet-56-noshort": "ResNet without residual connections (Figure 1)",
    "shake-shake-26-2x96d": "Shake-Shake (Table 1); also narrower, 2x32d",
    "pyramidnet-272-200": "PyramidNet, bottleneck, alpha 200 (Table 1); also smaller, pyramidnet-29-24",
    "pyramidnet-272-200-shakedrop": "PyramidNet with ShakeDrop (Table 1)",
    "cnn-32": "three plain convolutions, ours, for the demonstration",
    "vit-4-64-2": "a small vision transformer without batch norm: 4 blocks, width 64, patches of 2 x 2 pixels",
    "mlp-2-256": "a perceptron with 2 hidden layers of 256 units, on 8 x 8 pixels as a table of 64 columns",
    "char-transformer-2-64": "a small transformer for python-text: 2 blocks, width 64",
    "resnet-50": "ResNet-50, -101, -152 for ImageNet (Table 2), from timm",
    "efficientnet-b7": "EfficientNet-b7 and -l2 (fine-tuning), from timm",
    "timm/NAME": "every other model in timm",
}


def check_model_name(name: str) -> ParsedName:
    """Return what a name means, or raise a ValueError whose message, to follow "must be", says what is allowed.

    Example:
        >>> check_model_name("wrn-28-10")
        ParsedName(family='wrn', depth=28, width=10, alpha=0, patch_size=0, variant='', timm_name='')
    """
    if name in SHORT_NAMES_IN_TIMM:
        return ParsedName("timm", timm_name=SHORT_NAMES_IN_TIMM[name])
    for family, (pattern, is_valid, allowed) in FAMILIES.items():
        if match := re.fullmatch(pattern, name):
            given = {part: text for part, text in match.groupdict().items() if text is not None}
            parts: dict[str, Any] = {
                p: text if p in ("variant", "timm_name") else int(text) for p, text in given.items()
            }
            parsed = ParsedName(family, **parts)
            if not is_valid(parsed):
                raise ValueError(allowed)
            return parsed
    raise ValueError(f"the name of a model, such as {', '.join(EXAMPLES)} (`flatmin list` explains them)")
