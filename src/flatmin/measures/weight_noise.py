"""Random noise on the weights: average-case sharpness, and the condition of the theorem (Appendix A).

Average-case sharpness is how far the loss rises at a random point at distance rho. The condition is that Gaussian noise
does not lower the expected error.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.core.checks import check_rho
from flatmin.measures.batches import Batch
from flatmin.measures.checks import check_count, check_finite
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten, unflatten

CONFIDENCE = 0.95


@dataclass(frozen=True)
class AverageSharpness:
    """The mean rise of the loss under random noise."""

    mean: float
    """The mean over the draws."""
    standard_error: float
    """The standard error of the mean, over the draws; NaN where there is one draw only."""
    per_draw: np.ndarray
    """The rise of each draw, the mean over both of its signs."""
    value: float
    """The loss at the weights themselves."""
    rho: float
    """The norm of the noise."""


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


@dataclass(frozen=True)
class NoiseEffect:
    """How much Gaussian noise on the weights raises the error rate."""

    error: float
    """The error rate at the weights."""
    rise: float
    r"""The mean of :math:`\mathrm{err}(w + \epsilon) - \mathrm{err}(w)` over draws and examples."""
    half_width: float
    """Half of its 95 % confidence interval, which covers both the draws and the examples."""
    sigma: float
    """The standard deviation of the noise of each weight."""
    num_draws: int
    """How many perturbations were drawn."""
    num_examples: int
    """How many examples."""


def proof_sigma(rho: float, *, n: int, k: int) -> float:
    r"""Return :math:`\rho / (\sqrt k + \sqrt{\log n})`, the noise for which the proof uses the condition.

    With n training examples and k weights, the norm of such noise is at most rho with probability
    :math:`1 - 1 / \sqrt n`.

    Example:
        >>> proof_sigma(0.5, n=1, k=100)
        0.05
    """
    return rho / (math.sqrt(k) + math.sqrt(math.log(n)))


def noise_effect(
    model: nn.Module, data: Iterable[Batch], *, sigma: float, num_draws: int = 20, seed: int = 0
) -> NoiseEffect:
    r"""Measure how much noise :math:`\epsilon \sim N(0, \sigma^2 I)` on all weights raises the error rate.

    Every draw sees the same examples. Draws and examples are both random samples: the variance of the mean is
    estimated by the variance of the means over draws, plus the variance of the means over examples. Both contain the
    variance of a single cell, so the interval is slightly too wide, never too narrow. The data must not have been
    trained on.
    """
    from scipy.stats import t as student  # imported when used: SciPy takes a second to import

    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma must be finite and not negative, got {sigma!r}.")
    if num_draws < 2:
        raise ValueError(f"num_draws must be at least 2, got {num_draws}: one draw has no confidence interval.")
    objective = Objective(model, F.cross_entropy, data)
    if objective.num_examples < 2:
        raise ValueError(f"data must have at least two examples, got {objective.num_examples}.")
    weights = objective.weights()
    at_weights = _wrong(objective, weights)
    generator = torch.Generator().manual_seed(seed)
    per_example, per_draw = torch.zeros_like(at_weights), []
    for _ in range(num_draws):
        noisy = [
            w + sigma * torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.device, w.dtype)
            for w in weights
        ]
        rise = _wrong(objective, noisy) - at_weights
        per_example += rise / num_draws
        per_draw.append(float(rise.mean()))
    variance = float(per_example.var()) / len(per_example) + float(torch.tensor(per_draw).double().var()) / num_draws
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, num_draws - 1))
    return NoiseEffect(
        error=float(at_weights.mean()),
        rise=float(per_example.mean()),
        half_width=quantile * math.sqrt(variance),
        sigma=sigma,
        num_draws=num_draws,
        num_examples=len(at_weights),
    )


@torch.no_grad()
def _wrong(objective: Objective, weights: list[Tensor]) -> Tensor:
    """Return 1.0 for each example that is classified wrongly at these weights, else 0.0."""
    state, wrong = objective.state(weights), []
    for batch in objective.data:
        _, outputs, labels = objective.run(state, batch)
        wrong.append((outputs.argmax(1) != labels).double().cpu())
    return torch.cat(wrong)
