r"""How much SAM's update changes when its second-order term is kept (Appendix C.4)."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.core.perturbation import ascent_step, check_rho
from flatmin.measures.batches import Batch, rng_kept
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten


def sam_update_cosine(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    rho: float,
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
        rho: the radius of the neighbourhood.
        params: restricts the update to these parameters (or names).
        allow_nondeterministic: do not refuse a random model; both updates see the same noise.

    Raises:
        ValueError: if rho < 0, or an update is zero or not finite, so that it has no direction.

    Example:
        For L(w) = w^2 / 2 in one dimension the second-order term vanishes.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> sam_update_cosine(model, half_square, (torch.ones(4, 1), torch.zeros(4)), rho=0.1)
        1.0
    """
    check_rho(rho)
    objective = Objective(
        model, loss_fn, [batch], params=params, allow_nondeterministic=allow_nondeterministic
    )

    def loss(weights: Sequence[Tensor]) -> Tensor:
        with rng_kept():
            return objective.loss(weights, batch)

    with rng_kept(), sdpa_kernel(SDPBackend.MATH):
        first, second = _updates(loss, objective.weights(), rho)
    a, b = flatten(first, torch.float64), flatten(second, torch.float64)
    lengths = float(a.norm()), float(b.norm())
    if not all(math.isfinite(length) and length > 0 for length in lengths):
        raise ValueError(
            f"An update has no direction: the norms of the two are {lengths[0]:g} and {lengths[1]:g}."
        )
    return max(-1.0, min(1.0, float(a @ b) / (lengths[0] * lengths[1])))


def _updates(
    loss: Callable[[Sequence[Tensor]], Tensor], weights: list[Tensor], rho: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return SAM's gradient without and with its second-order term."""

    def gradient(at: Sequence[Tensor], graph: bool) -> tuple[list[Tensor], Sequence[Tensor]]:
        leaves = [w.detach().requires_grad_() for w in at]
        with torch.enable_grad():
            return leaves, torch.autograd.grad(
                loss(leaves), leaves, create_graph=graph, materialize_grads=True
            )

    leaves, g = gradient(weights, True)
    unit = ascent_step([t.detach() for t in g], rho=1.0)
    v = gradient([w + rho * d for w, d in zip(weights, unit, strict=True)], False)[1]
    size = math.sqrt(sum(float(t.detach().double().square().sum()) for t in g))
    along = sum(float((d * t).sum()) for d, t in zip(unit, v, strict=True))
    scale = rho / size if size > 0 else 0.0
    u = [scale * (t - along * d) for d, t in zip(unit, v, strict=True)]
    pairs = [(t, x) for t, x in zip(g, u, strict=True) if t.requires_grad]
    if not pairs:
        return list(v), list(v)
    outputs, vectors = zip(*pairs, strict=True)
    term = torch.autograd.grad(outputs, leaves, vectors, materialize_grads=True)
    return list(v), [t + h for t, h in zip(v, term, strict=True)]
