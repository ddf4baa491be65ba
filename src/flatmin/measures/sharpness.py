"""m-sharpness: how far the loss rises around the weights, on subsets of m examples (Section 4.1)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from flatmin.core.checks import check_adaptive, check_p, check_rho
from flatmin.core.perturbation import adaptive_scale, ascent_step, project_
from flatmin.measures import plots
from flatmin.measures.batches import Batch, measuring, subsets
from flatmin.measures.checks import check_count, check_finite, check_metric
from flatmin.measures.objective import LossFn, Objective, Value
from flatmin.measures.parameters import Params, flatten, unflatten


@dataclass(frozen=True)
class Sharpness:
    """The m-sharpness of a model."""

    mean: float
    """The mean over the subsets, weighted by their sizes."""
    standard_error: float
    """The standard error of the mean; NaN where there is one subset only."""
    per_subset: np.ndarray
    """The sharpness of each subset, in the data's order (rank by rank with a group)."""
    sizes: np.ndarray
    """The number of examples of each subset."""
    value: float
    """The metric at the weights themselves, over all data."""
    rho: float
    """The radius of the ball."""
    m: int
    """The number of examples in a subset; the last one may be short."""
    p: float
    """The norm of the ball."""
    metric: str
    """Either "loss" or "error"."""

    def plot(self) -> "plots.Figure":
        """Return a matplotlib figure of the subsets' sharpness and their mean."""
        return plots.sharpness(self)


def m_sharpness(
    model: nn.Module,
    loss_fn: LossFn,
    data: Iterable[Batch],
    *,
    rho: float = 0.05,
    m: int | None = None,
    p: float = 2.0,
    steps: int = 1,
    adaptive: bool | float = False,
    metric: Literal["loss", "error"] = "loss",
    params: Params | None = None,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    allow_nondeterministic: bool = False,
) -> Sharpness:
    r"""Return the mean over subsets of :math:`\max_{\|\epsilon\|_p \le \rho} L(w+\epsilon) - L(w)`.

    The subsets are disjoint, of m examples each, consecutive in the data's order; m = n is plain sharpness.

    The maximum is approximated from below by SAM's ascent (Foret et al., 2021, Section 4.1 and Appendix C.6).
    With one step the result is exactly :math:`L(w + \hat\epsilon) - L(w)`, sign and all. With several, each
    step adds one of full length at the gradient taken where one stands, then projects on the ball; the best
    visited point counts, :math:`\epsilon = 0` included.

    The cost is ``steps`` gradients and one loss over the data. A subset runs in pieces no larger than the
    data's batches (or ``chunk_size``): m may exceed what fits in memory at once. The m examples
    themselves are kept if m < n.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        rho: the radius of the ball.
        m: the number of examples in a subset; all if None.
        p: the norm of the ball, in [1, inf]; 1, 2 or inf with several steps.
        steps: the number of ascent steps.
        adaptive: measure in ASAM's ball, :math:`\|\epsilon / (|w| + \eta)\|_p \le \rho`; a float is eta, True
            is 0.01.
        metric: "loss", or "error" to ascend the loss and report the error rate (Appendix C.6).
        params: restricts the perturbation to these parameters (or names).
        chunk_size: the largest number of examples to run at once; the data's batches if None.
        group: each rank holds a shard of the data; subsets do not cross ranks, unless m is all.
        allow_nondeterministic: allow a random model or random data.

    Returns:
        The sharpness of each subset, their weighted mean and its standard error.

    Raises:
        ValueError: if rho < 0, m is not in 1..n, the data is empty, or the loss is not finite or not
            deterministic.

    Example:
        For L(w) = w^2 / 2 at w = 3, the step is rho, and L(3.5) - L(3) = (12.25 - 9) / 2.

        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> m_sharpness(model, half_square, [(torch.ones(4, 1), torch.zeros(4))], rho=0.5).mean
        1.625
    """
    rho, p = check_rho(rho), check_p(p)
    eta = check_adaptive(adaptive)
    check_count("steps", steps)
    if steps > 1 and p not in (1.0, 2.0, math.inf):
        raise ValueError(f"p must be 1, 2 or inf with several steps, got {p}: there is no projection for other p.")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size)
    check_metric(metric)
    if m is not None:
        check_count("m", m)
    objective = Objective(
        model, loss_fn, data, params=params, group=group, allow_nondeterministic=allow_nondeterministic
    )
    m = _check_m(objective, m)
    scale = adaptive_scale(flatten(objective.weights(), objective.dtype), rho, eta)
    ascent = _Ascent(objective, scale, p, steps, metric, chunk_size)
    if m == objective.num_examples:
        rises = [ascent.sharpness(None)]
    else:
        with measuring(objective.data):
            parts = objective.together(lambda: list(map(ascent.sharpness, subsets(objective.data, m, chunk_size))))
        rises = [pair for part in parts for pair in part]
    return _summary(rises, rho=rho, m=m, p=p, metric=metric)


@dataclass(frozen=True)
class _Ascent:
    """Ascends the loss within the ball, on one subset at a time."""

    objective: Objective
    scale: Tensor | float  # T: the ball is d's, with eps = T * d
    p: float
    steps: int
    metric: str
    size: int | None

    def sharpness(self, subset: list[Batch] | None) -> tuple[float, Value]:
        """Return the sharpness on a subset (on all data if None), and the value at the weights themselves."""
        weights = self.objective.weights()
        center = flatten(weights, self.objective.dtype)
        error = self.metric == "error"
        value, gradient = self.objective.gradient(weights, subset, error=error, size=self.size)
        check_finite(value, "at the weights")
        visited = [value]
        direction: Tensor | None = None
        for step in range(1, self.steps + 1):
            direction = self._advance(direction, gradient)
            point = unflatten(center + direction * self.scale, weights)
            if step == self.steps:
                value = self.objective.value(point, subset, error=error, size=self.size)
            else:
                value, gradient = self.objective.gradient(point, subset, error=error, size=self.size)
            check_finite(value, "at the perturbed weights; try a smaller rho")
            visited.append(value)
        best = visited[1] if self.steps == 1 else max(visited, key=lambda v: v.metric(self.metric))
        return best.metric(self.metric) - visited[0].metric(self.metric), visited[0]

    def _advance(self, direction: Tensor | None, gradient: Tensor) -> Tensor:
        """Add one full step to a direction in the unit ball, and project it."""
        (step,) = ascent_step([gradient * self.scale], rho=1.0, p=self.p)
        if direction is None:
            return step
        moved = direction + step
        project_([moved], self.p)
        return moved


def rise_in_ball(objective: Objective, *, rho: float, steps: int, metric: str) -> tuple[float, Value]:
    """Return the L2 sharpness on all data, and the value at the weights themselves."""
    check_count("steps", steps)
    check_metric(metric)
    return _Ascent(objective, rho, 2.0, steps, metric, None).sharpness(None)


def _summary(rises: list[tuple[float, Value]], *, rho: float, m: int, p: float, metric: str) -> Sharpness:
    per_subset = np.array([rise for rise, _ in rises])
    sizes = np.array([value.num_examples for _, value in rises])
    share = sizes / sizes.sum()
    mean = float(share @ per_subset)
    num = len(rises)
    # The variance of a weighted mean; for equal sizes it is s^2 / num.
    variance = float(share**2 @ (per_subset - mean) ** 2) * num / (num - 1) if num > 1 else math.nan
    value = float(share @ np.array([value.metric(metric) for _, value in rises]))
    return Sharpness(mean, math.sqrt(variance), per_subset, sizes, value, rho, m, p, metric)


def _check_m(objective: Objective, m: int | None) -> int:
    n = objective.num_examples
    if m is None or m == n:
        return n
    if m > n:
        raise ValueError(f"m must be at most the number of examples, {n}, got {m}. Leave m None for all of them.")
    smallest = min(objective.shards)
    if m > smallest:
        raise ValueError(
            f"m must be at most the number of examples of every rank, at least {smallest}, or all {n}; got {m}: "
            "a subset cannot cross ranks."
        )
    return m
