"""The SAM gradient as a pure function, with or without its second-order term."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flatmin.core import perturbation
from flatmin.core.checks import check_adaptive, check_ascent_steps, check_p, check_rho
from flatmin.core.function_state import modules_in
from flatmin.core.pass_state import own_buffers
from flatmin.core.rng import RandomState

Tensors = Sequence[Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True)
class SAMGradient:
    r"""The SAM gradient and what it was computed from; ``grads`` and ``perturbation`` are built like ``params``."""

    loss: Tensor
    """The loss at w."""
    perturbed_loss: Tensor
    r"""The loss at :math:`w + \epsilon`."""
    grads: Any
    """The gradient of the SAM loss, a list or dict of tensors."""
    perturbation: Any
    r""":math:`\epsilon`, a list or dict of tensors."""


def sam_gradient(
    loss_fn: Callable[[Any], Tensor],
    params: Tensors,
    *,
    rho: float = 0.05,
    p: float = 2.0,
    adaptive: bool | float = False,
    ascent_steps: int = 1,
    direction: Literal["gradient", "random"] = "gradient",
    second_order: bool = False,
    generator: torch.Generator | None = None,
) -> SAMGradient:
    r"""Return the gradient of :math:`L(w + \hat\epsilon(w))` (Foret et al., 2021, Eq. 2 and 3), changing nothing.

    By default :math:`\hat\epsilon` is taken as a constant, as SAM does. With ``second_order`` the gradient is exact:

    .. math:: \nabla_w L(w + \hat\epsilon(w)) = v + H u, \qquad v = \nabla L(w + \hat\epsilon), \quad
              u = \frac{\rho}{\lVert g \rVert} \left( v - \hat g \langle \hat g, v \rangle \right),
              \quad \hat g = g / \lVert g \rVert,

    for p = 2, where H is the Hessian at w, which enters through one Hessian-vector product. For p = inf the term is 0
    almost everywhere, because the sign of the gradient is constant almost everywhere.

    Random layers draw the same noise in all passes, and the generators end where one pass would have left them. Models
    that ``loss_fn`` refers to keep their buffers.

    Args:
        loss_fn: the loss as a function of parameters built like ``params``, say with ``torch.func.functional_call``.
        params: w, a sequence or a mapping of tensors.
        rho: the radius of the neighborhood.
        p: its norm, in [1, inf].
        adaptive: ASAM: a float is its eta; True is 0.01.
        ascent_steps: steps of projected gradient ascent; more than one needs p in {1, 2, inf}.
        direction: "gradient", or "random" for a Gaussian direction of the same norm.
        second_order: add the Hessian term. Needs p in {2, inf}, one ascent step, and no ASAM.
        generator: where a random direction comes from; torch's default generator if None.

    Returns:
        Losses, gradients and perturbation, detached.

    Raises:
        ValueError: an argument out of its range, or an unsupported combination.

    Example:
        For :math:`L(w) = w^2 / 2` at w = 1 the SAM gradient is 1 + rho:

        >>> sam_gradient(lambda w: (w[0] ** 2).sum() / 2, [torch.tensor([1.0])], rho=0.5).grads
        [tensor([1.5000])]
    """
    p, rho, eta = check_p(p), check_rho(rho), check_adaptive(adaptive)
    if direction not in ("gradient", "random"):
        raise ValueError(f'direction must be "gradient" or "random", got {direction!r}.')
    check_ascent_steps(ascent_steps, p, direction)
    _check_second_order(second_order, p, eta, ascent_steps)
    names = list(params) if isinstance(params, Mapping) else None
    w = [t.detach() for t in (params.values() if isinstance(params, Mapping) else params)]
    if not w:
        raise ValueError("params is empty: there is nothing to differentiate by.")
    noise = RandomState({t.device for t in w})
    models = modules_in(loss_fn)

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        return list(tensors) if names is None else dict(zip(names, tensors, strict=True))

    def evaluate(at: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        noise.restore()
        leaves = [t.detach().requires_grad_() for t in at]
        with torch.enable_grad(), own_buffers(models):
            loss = loss_fn(rebuild(leaves))
            found = torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True)
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(at, found, strict=True)]
        return loss.detach(), leaves, grads

    term_exists = second_order and p == 2 and direction == "gradient"
    loss, leaves, g = evaluate(w, create_graph=term_exists)
    scales = [perturbation.adaptive_scale(t, rho, eta) for t in w]
    with torch.no_grad():
        if direction == "random":
            eps = perturbation.random_step(w, p=p, scales=scales, generator=generator)
        else:
            d = perturbation.ascent_direction(g, p=p, scales=scales)
            eps = perturbation.apply_scales(d, scales, like=w)
    for _ in range(1, ascent_steps):
        _, _, further = evaluate([t + e for t, e in zip(w, eps, strict=True)])
        for x, step in zip(d, perturbation.ascent_direction(further, p=p, scales=scales), strict=True):
            x.add_(step)
        perturbation.project_(d, p)
        eps = perturbation.apply_scales(d, scales, like=w)
    perturbed_loss, _, v = evaluate([t + e for t, e in zip(w, eps, strict=True)])
    if term_exists:
        # A gradient that does not depend on w (of a loss linear in it) has no graph, and no part in the term.
        pairs = [(a, u) for a, u in zip(g, _contracted(g, v, rho), strict=True) if a.requires_grad]
        if pairs:
            term = torch.autograd.grad([a for a, _ in pairs], leaves, [u for _, u in pairs], allow_unused=True)
            v = [a if b is None else a + b for a, b in zip(v, term, strict=True)]
    return SAMGradient(loss, perturbed_loss, rebuild([t.detach() for t in v]), rebuild(eps))


def _contracted(g: Sequence[Tensor], v: Sequence[Tensor], rho: float) -> list[Tensor]:
    r"""Return u, the derivative of :math:`\rho g / \lVert g \rVert` by g applied to v. The matrix is symmetric."""
    with torch.no_grad():
        unit = perturbation.ascent_step(g, rho=1.0)
        along = torch.stack([(a.conj() * b).real.sum() for a, b in zip(unit, v, strict=True)]).sum()
        size = perturbation.norm(perturbation.joint_row(g, 2), 2)
        factor = torch.where(size > 0, rho / size, 0.0)
        return [factor * (b - a * along) for a, b in zip(unit, v, strict=True)]


def _check_second_order(second_order: bool, p: float, eta: float | None, ascent_steps: int) -> None:
    if not second_order:
        return
    if p not in (2, math.inf):
        raise ValueError(f"second_order=True supports only p=2 and p=inf, got p={p}.")
    if eta is not None:
        raise ValueError("second_order=True does not support adaptive. Leave out one.")
    if ascent_steps > 1:
        raise ValueError(f"second_order=True supports only ascent_steps=1, got {ascent_steps}.")
