"""What is left of a perturbation when weights are stored, or multiplied, in fewer bits."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatmin.core import perturbation
from flatmin.core.dtensor import is_sharded
from flatmin.core.sam import SAM


@dataclass(frozen=True)
class EffectivePerturbation:
    r"""The perturbation a forward pass sees, next to the one that was asked for. Norms are Euclidean.

    With :math:`\tilde\epsilon = round(w + \epsilon) - round(w)`:
    """

    norm: float
    r""":math:`\lVert \epsilon \rVert_2`."""
    effective_norm: float
    r""":math:`\lVert \tilde\epsilon \rVert_2`. Rounding noise adds to it."""
    cosine: float
    r"""The cosine between the two: 1 without rounding, NaN where one of them is 0."""
    projection: float
    r""":math:`\langle \tilde\epsilon, \epsilon \rangle / \lVert \epsilon \rVert^2`: 1 if the asked step is kept."""
    unmoved: float
    """The share of the weights that rounding puts back where they were, among those that should move."""


@torch.no_grad()
def effective_perturbation(opt: SAM, *, compute_dtype: torch.dtype | None = None) -> EffectivePerturbation:
    r"""Return how rounding changes the perturbation that ``opt`` would make of the gradients there are now.

    Weights stored in bfloat16 have 8 significant bits: a weight of 1 moves only if its share of :math:`\epsilon`
    exceeds 1/512. Under autocast the same happens to the copies that matrix products and convolutions work with. Call
    it after a ``backward()``; it changes nothing and, unlike a step, synchronizes with the device.

    Args:
        opt: the optimizer, with gradients at hand.
        compute_dtype: the autocast dtype, which is taken to round the parameters with two dimensions or more.

    Raises:
        ValueError: there are no gradients, or the direction is random.
    """
    if opt.settings.direction != "gradient":
        raise ValueError('opt must have direction="gradient": other perturbations cannot be foreseen.')
    grads, scales, weights = [], [], []
    for group, rho in zip(opt.param_groups, opt._passes.radii(), strict=True):
        for p in dict.fromkeys(group["params"]):
            if p.grad is not None and rho > 0:
                weights.append(_whole(p))
                grads.append(_whole(p.grad))
                scales.append(perturbation.adaptive_scale(weights[-1], rho, opt.settings.eta))
    if not grads:
        raise ValueError("opt has no gradients (of parameters with a radius above 0): call backward() first.")
    asked, effective = [], []
    steps = perturbation.ascent_step(
        [g.to(perturbation.working_dtype(g.dtype)) for g in grads], p=opt.settings.p, scales=scales
    )
    for weight, eps in zip(weights, steps, strict=True):
        dtype = compute_dtype if compute_dtype is not None and weight.dim() > 1 else weight.dtype
        moved = (weight + eps).to(weight.dtype).to(dtype).double() - weight.to(dtype).double()
        asked.append(eps.double().flatten())
        effective.append(moved.flatten())
    eps, seen = torch.cat(asked), torch.cat(effective)
    inner, norm, seen_norm = (eps @ seen).item(), eps.norm().item(), seen.norm().item()
    moving = eps != 0
    return EffectivePerturbation(
        norm=norm,
        effective_norm=seen_norm,
        cosine=inner / (norm * seen_norm) if norm and seen_norm else math.nan,
        projection=inner / norm**2 if norm else math.nan,
        unmoved=((seen == 0) & moving).sum().item() / max(moving.sum().item(), 1),
    )


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return perturbation.working_copy(whole).to(whole.dtype) if whole.is_sparse else whole.detach()
