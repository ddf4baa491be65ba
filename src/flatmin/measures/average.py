"""Average-case sharpness: how far the loss rises at a random point at distance rho."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flatmin.core.checks import check_rho
from flatmin.measures.batches import Batch
from flatmin.measures.checks import check_count, check_finite
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten, unflatten


@dataclass(frozen=True)
class AverageSharpness:
    """The mean rise of the loss under random noise.

    Attributes:
        mean: the mean over the draws.
        standard_error: of the mean, over the draws; NaN where there is one draw only.
        per_draw: the rise of each draw, the mean over both of its signs.
        value: the loss at the weights themselves.
        rho: the norm of the noise.
    """

    mean: float
    standard_error: float
    per_draw: np.ndarray
    value: float
    rho: float


def average_sharpness(
    model: nn.Module,
    loss_fn: LossFn,
    data: Iterable[Batch],
    rho: float = 0.05,
    num_draws: int = 20,
    *,
    params: Params | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    allow_nondeterministic: bool = False,
) -> AverageSharpness:
    r"""Return the mean of :math:`L(w + \epsilon) - L(w)` over Gaussian noise that is scaled to the norm rho.

    The noise is :math:`\epsilon = \rho\, z / \lVert z \rVert_2` with :math:`z \sim N(0, I)` over all k weights:
    uniform on the sphere of radius rho, the boundary of the ball in which :func:`flatmin.m_sharpness` (m = n)
    takes the maximum. So the average is at most that maximum, for every draw. Unscaled noise
    :math:`N(0, \rho^2 I / k)` has the norm rho in the root mean square only; the two agree up to
    :math:`O(1 / k)`.

    As :math:`E[\epsilon \epsilon^\top] = \rho^2 I / k`, the mean is :math:`\rho^2 \, \mathrm{tr}(H) / (2 k)`, up to
    terms of order :math:`\rho^4`: half the mean eigenvalue times rho squared. Every draw is used with both signs.
    This removes the term :math:`g \cdot \epsilon`, whose mean is 0 and whose standard deviation
    :math:`\rho \lVert g \rVert / \sqrt k` would drown the mean.

    The cost is 2 ``num_draws`` + 1 losses over the data, without gradients.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        rho: the norm of the noise.
        num_draws: how many draws, each with both signs.
        params: restricts the noise to these parameters (or names).
        group: each rank holds a shard of the data; the result is for the whole.
        seed: of the draws; they are the same on every device.
        allow_nondeterministic: allow a random model or random data.

    Raises:
        ValueError: if rho < 0, num_draws < 1, the data is empty, or the loss is not finite or not deterministic.

    Example:
        L(w) = |w|^2 / 2 rises by rho^2 / 2 on average, whatever w is, and here in every draw.

        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False).double()
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> data = [(2**0.5 * torch.eye(2).double(), torch.zeros(2))]
        >>> round(average_sharpness(model, half_square, data, rho=0.5).mean, 9)
        0.125
    """
    rho = check_rho(rho)
    check_count("num_draws", num_draws)
    objective = Objective(
        model, loss_fn, data, params=params, group=group, allow_nondeterministic=allow_nondeterministic
    )
    weights = objective.weights()
    center = flatten(weights, objective.dtype)
    start = objective.value(weights)
    check_finite(start, "at the weights")
    generator = torch.Generator().manual_seed(seed)
    per_draw = np.zeros(num_draws)
    for draw in range(num_draws):
        z = torch.randn(len(center), generator=generator, dtype=torch.float64)
        noise = (z * (rho / torch.linalg.vector_norm(z))).to(center.dtype).to(center.device)
        for point in (center + noise, center - noise):
            value = objective.value(unflatten(point, weights))
            check_finite(value, "at the perturbed weights; try a smaller rho")
            per_draw[draw] += (value.loss - start.loss) / 2
    error = float(per_draw.std(ddof=1)) / math.sqrt(num_draws) if num_draws > 1 else math.nan
    return AverageSharpness(float(per_draw.mean()), error, per_draw, start.loss, rho)
