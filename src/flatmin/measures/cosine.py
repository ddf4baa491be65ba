r"""How much SAM's update changes when its second-order term is kept (Appendix C.4)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.core.checks import check_rho
from flatmin.core.gradient import sam_gradient
from flatmin.measures.batches import Batch, measuring
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten


def sam_update_cosine(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    rho: float,
    weight_decay: float = 0.0,
    params: Params | None = None,
    allow_nondeterministic: bool = False,
) -> float:
    r"""Return the cosine between SAM's update and the exact gradient of :math:`L(w + \hat\epsilon(w))`.

    SAM takes :math:`\hat\epsilon = \rho g / \lVert g \rVert` for a constant and descends along
    :math:`v = \nabla L(w + \hat\epsilon)`. The exact gradient is :math:`v + H u` with
    :math:`u = \frac{\rho}{\lVert g \rVert} (v - \hat g \langle \hat g, v \rangle)` and the Hessian H at w.
    Appendix C.4 reports the cosine of the two along training: near 1 at first, less near convergence.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        batch: ``(inputs, targets)``.
        rho: the radius of the neighborhood.
        weight_decay: adds :math:`\frac{\lambda}{2} \lVert w \rVert^2` to the loss, for training that has it there.
        params: restricts the update to these parameters (or names).
        allow_nondeterministic: allow a random model; both updates see the same noise.

    Raises:
        ValueError: if rho < 0, or an update is zero or not finite: it has no direction.

    Example:
        For L(w) = w^2 / 2 in one dimension the second-order term vanishes.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> sam_update_cosine(model, half_square, (torch.ones(4, 1), torch.zeros(4)), rho=0.1)
        1.0
    """
    check_rho(rho)
    objective = Objective(model, loss_fn, [batch], params=params, allow_nondeterministic=allow_nondeterministic)

    def loss(weights: list[Tensor]) -> Tensor:
        penalty = sum(w.square().sum() for w in weights) if weight_decay else 0.0
        return objective.differentiable(weights, batch)[0] + weight_decay / 2 * penalty

    # Fused attention has no second derivative.
    with measuring(), sdpa_kernel(SDPBackend.MATH):
        first, second = (
            sam_gradient(loss, objective.weights(), rho=rho, second_order=exact).grads for exact in (False, True)
        )
    a, b = flatten(first, torch.float64), flatten(second, torch.float64)
    lengths = float(a.norm()), float(b.norm())
    if not all(math.isfinite(length) and length > 0 for length in lengths):
        raise ValueError(f"An update has no direction: the norms of the two are {lengths[0]:g} and {lengths[1]:g}.")
    return max(-1.0, min(1.0, float(a @ b) / (lengths[0] * lengths[1])))
