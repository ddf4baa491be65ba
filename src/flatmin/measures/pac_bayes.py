r"""The PAC-Bayesian bound of the paper (Appendix A), term by term."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import nn

from flatmin.core.checks import check_rho
from flatmin.measures import plots
from flatmin.measures.batches import Batch
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params
from flatmin.measures.sharpness import rise_in_ball

RANGE_TOLERANCE = 1e-6  # a mean of clipped losses may exceed their bound by rounding


@dataclass(frozen=True)
class Bound:
    """An estimate of a bound on the expected loss that holds with probability 1 - delta.

    It is an estimate because ascent finds a lower bound of the largest loss in the ball, and because the
    theorem assumes that Gaussian noise on the weights does not lower the expected loss.
    """

    loss: float
    """The loss on the data, at the weights."""
    sharp_loss: float
    """The largest loss found within the ball."""
    weight_term: float
    r""":math:`k \log(1 + \frac{\|w\|^2}{\rho^2} (1 + \sqrt{\log(n) / k})^2)`."""
    confidence_term: float
    r""":math:`4 \log(n / \delta)`."""
    union_term: float
    r""":math:`8 \log(6n + 3k)`, from the union over the widths of the prior."""
    complexity: float
    """The range of the loss times the root of the sum of the three terms over n - 1."""
    total: float
    """The estimate, ``sharp_loss + complexity``."""
    vacuous: bool
    """Whether total exceeds the range and says nothing new."""
    loss_range: float
    """The largest value of the loss; the smallest is 0."""
    num_examples: int
    """The number n of examples."""
    num_weights: int
    """The number k of weights."""
    weight_norm: float
    r""":math:`\|w\|_2`."""

    def __str__(self) -> str:
        verdict = f"vacuous: above the range of the loss, {self.loss_range:g}" if self.vacuous else "not vacuous"
        return (
            f"estimate of the bound: {self.total:.4g} = {self.sharp_loss:.4g} (sharp loss) + {self.complexity:.4g} "
            f"(complexity); {verdict}"
        )

    def plot(self) -> "plots.Figure":
        """Return a matplotlib figure of the terms of the bound, next to the range of the loss."""
        return plots.bound(self)


def pac_bayes_bound(
    model: nn.Module,
    loss_fn: LossFn,
    data: Iterable[Batch],
    *,
    rho: float,
    delta: float = 0.05,
    loss_range: float = 1.0,
    metric: Literal["loss", "error"] = "loss",
    steps: int = 1,
    params: Params | None = None,
    group: dist.ProcessGroup | None = None,
    allow_nondeterministic: bool = False,
) -> Bound:
    r"""Estimate the bound on the expected loss, the last display of Appendix A as it is printed.

    With probability :math:`1 - \delta` over the n examples, for k weights and a loss in [0, 1],

    .. math:: L_D(w) \le \max_{\|\epsilon\|_2 \le \rho} L_S(w + \epsilon) + \sqrt{\frac{k \log\left(1 +
        \frac{\|w\|_2^2}{\rho^2} \left(1 + \sqrt{\frac{\log n}{k}}\right)^2\right) + 4 \log\frac{n}{\delta} +
        8 \log(6n + 3k)}{n - 1}}

    Departures: the theorem's :math:`\tilde O(1)` is the proof's 8 log(6n + 3k). The proof drops the 1 that
        its display before carries (1/4 under a root that is then doubled): it would add 1 to the numerator. A
        loss in [0, R] is divided by R, so the root is multiplied by it. The maximum is what ascent
        finds, the weights themselves included.

    For the 0-1 error pass any differentiable loss with ``metric="error"``: it is ascended, and the error is
    reported. For another loss clip it, for instance with ``torch.nn.functional.cross_entropy(o, t,
    reduction="none").clamp(max=R).mean()``.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch of a loss in [0, loss_range].
        data: an iterable of ``(inputs, targets)`` batches: the training set.
        rho: the radius of the ball, positive.
        delta: the probability with which the bound may fail.
        loss_range: R, the largest value that the loss can take.
        metric: "loss", or "error" for the 0-1 error, whose range is 1.
        steps: the number of ascent steps.
        params: restricts w and k to these parameters (or names), as if the others had been fixed beforehand.
        group: each rank holds a shard of the data.
        allow_nondeterministic: allow a random model or random data.

    Raises:
        ValueError: if rho, delta or loss_range are out of range, there are fewer than two examples, or a loss
            is outside of [0, loss_range].

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(0.5)
        >>> square = lambda outputs, targets: (outputs**2).clamp(max=1).mean()
        >>> bound = pac_bayes_bound(model, square, [(torch.ones(1000, 1), torch.zeros(1000))], rho=0.1)
        >>> print(bound)
        estimate of the bound: 0.6993 = 0.36 (sharp loss) + 0.3393 (complexity); not vacuous
    """
    if check_rho(rho) == 0:
        raise ValueError("rho must be positive, got 0: the bound divides by it.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta!r}: the bound holds with probability 1 - delta.")
    if not (loss_range > 0 and math.isfinite(loss_range)):
        raise ValueError(f"loss_range must be positive and finite, got {loss_range!r}. Clip the loss to a known range.")
    if metric == "error" and loss_range != 1:
        raise ValueError(f"loss_range must be 1 with metric='error', the range of an error rate; got {loss_range!r}.")
    objective = Objective(
        model, loss_fn, data, params=params, group=group, allow_nondeterministic=allow_nondeterministic
    )
    n = objective.num_examples
    if n < 2:
        raise ValueError(f"data must have at least two examples, got {n}: the bound divides by n - 1.")
    rise, at_weights = rise_in_ball(objective, rho=rho, steps=steps, metric=metric)
    loss = at_weights.metric(metric)
    sharp_loss = loss + max(rise, 0.0)
    for value in (loss, sharp_loss):
        if not -RANGE_TOLERANCE * loss_range <= value <= loss_range * (1 + RANGE_TOLERANCE):
            raise ValueError(
                f"The loss is {value:.4g}, outside of [0, {loss_range:g}]. The bound needs a known range: clip the "
                "loss of each example and pass loss_range, or pass metric='error'."
            )
    weights = objective.weights()
    k = sum(w.numel() for w in weights)
    norm = math.sqrt(math.fsum(float(w.double().square().sum()) for w in weights))
    terms = complexity_terms(n=n, k=k, weight_norm=norm, rho=rho, delta=delta)
    complexity = loss_range * math.sqrt(sum(terms) / (n - 1))
    total = sharp_loss + complexity
    return Bound(loss, sharp_loss, *terms, complexity, total, total > loss_range, loss_range, n, k, norm)


def complexity_terms(*, n: int, k: int, weight_norm: float, rho: float, delta: float) -> tuple[float, float, float]:
    r"""Return the three terms under the root: of the weights, the confidence, and the union over priors.

    Example:
        >>> [round(term, 3) for term in complexity_terms(n=100, k=1, weight_norm=1.0, rho=1.0, delta=0.05)]
        [2.388, 30.404, 51.215]
    """
    spread = (1 + math.sqrt(math.log(n) / k)) ** 2
    weight_term = k * math.log1p((weight_norm / rho) ** 2 * spread)
    return weight_term, 4 * math.log(n / delta), 8 * math.log(6 * n + 3 * k)
