"""The condition of the theorem: Gaussian noise on the weights does not lower the expected error (Appendix A)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatmin.measures.batches import Batch
from flatmin.measures.objective import Objective

CONFIDENCE = 0.95


@dataclass(frozen=True)
class NoiseEffect:
    r"""How much Gaussian noise on the weights raises the error rate.

    Attributes:
        error: the error rate at the weights.
        rise: the mean of :math:`\mathrm{err}(w + \epsilon) - \mathrm{err}(w)` over draws and examples.
        half_width: half of its 95 % confidence interval, which covers both the draws and the examples.
        sigma: the standard deviation of the noise of each weight.
        num_draws: how many perturbations were drawn.
        num_examples: how many examples.
    """

    error: float
    rise: float
    half_width: float
    sigma: float
    num_draws: int
    num_examples: int


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
