r"""The spectrum of a Hessian: its largest or smallest eigenvalues, and its density (Section 4.2)."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flatmin.measures import plots
from flatmin.measures.checks import check_count, check_operator
from flatmin.measures.lanczos import Krylov, Operator, random_normal, random_signs


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues at one end of a spectrum, and their vectors."""

    values: np.ndarray
    """The k largest, algebraically, in descending order, or the k smallest in ascending order; float64."""
    vectors: Tensor
    """The eigenvectors, of norm 1, in the columns of a tensor (dim, k)."""
    residuals: np.ndarray
    r""":math:`\lVert H v - \lambda v \rVert_2` of each pair, by Lanczos' recurrence."""
    converged: bool
    """Whether every residual is below tol times the eigenvalue's magnitude (or at rounding)."""
    num_products: int
    """How many Hessian-vector products it took."""

    def ratio(self, first: int, second: int) -> float:
        r"""Return :math:`\lambda_{first} / \lambda_{second}`, counted from 1, as in the paper."""
        for name, index in (("first", first), ("second", second)):
            if not 1 <= index <= len(self.values):
                raise ValueError(f"{name} must be in 1..{len(self.values)} (eigenvalues count from 1), got {index}.")
        return float(self.values[first - 1] / self.values[second - 1])

    def plot(self) -> "plots.Figure":
        """Return a matplotlib figure of the eigenvalues, with their residuals as error bars."""
        return plots.eigenvalues(self)


def top_eigenvalues(
    op: Operator,
    k: int = 5,
    *,
    which: Literal["largest", "smallest"] = "largest",
    tol: float = 1e-3,
    max_iter: int = 200,
    seed: int = 0,
) -> Eigenvalues:
    r"""Return the k largest or smallest eigenvalues, by Lanczos' method with two-pass reorthogonalization.

    It stops as soon as every residual :math:`\lVert H v - \lambda v \rVert` is at most
    :math:`tol\,|\lambda|`, which bounds the error of the eigenvalue by the same (and, where it is isolated,
    by its square over the gap). When the Krylov space closes early, the search continues in its complement, so
    multiple eigenvalues found there count as often as they occur. It keeps one vector of ``op.dim``
    numbers for each product. An eigenvalue near 0, such as the smallest of a Gauss-Newton matrix with fewer examples
    than weights, has to be found to rounding, which may take as many products as there are weights.

    Args:
        op: a :class:`flatmin.HessianOperator` or :class:`flatmin.GGNOperator`, or anything symmetric with ``dim``,
            ``dtype``, ``device`` and ``@``.
        k: how many.
        which: "largest", or "smallest": algebraically, so the most negative ones come first.
        tol: the residual to reach, relative to the eigenvalue.
        max_iter: the largest number of products.
        seed: of the random first vector.

    Raises:
        ValueError: if k or max_iter is out of range, or a product is not finite.

    Warns:
        RuntimeWarning: if max_iter products did not suffice; the best values found are returned.

    Example:
        >>> from flatmin.measures import HessianOperator
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> data = [(torch.diag(torch.tensor([3.0, 6.0, 9.0])), torch.zeros(3))]
        >>> result = top_eigenvalues(HessianOperator(model, half_square, data), k=2)
        >>> result.values.round(3).tolist(), round(result.ratio(1, 2), 3)
        ([27.0, 12.0], 2.25)
        >>> top_eigenvalues(HessianOperator(model, half_square, data), k=1, which="smallest").values.round(3).tolist()
        [3.0]
    """
    check_operator(op)
    check_count("k", k)
    check_count("max_iter", max_iter)
    if which not in ("largest", "smallest"):
        raise ValueError(f'which must be "largest" or "smallest", got {which!r}.')
    if k > op.dim:
        raise ValueError(f"k must be at most the number of weights, {op.dim}, got {k}.")
    if max_iter < k:
        raise ValueError(f"max_iter must be at least k = {k}: every eigenvalue takes a product, got {max_iter}.")
    if not tol > 0:
        raise ValueError(f"tol must be positive, got {tol!r}; 1e-3 is the default.")
    generator = torch.Generator().manual_seed(seed)
    krylov = Krylov(op if which == "largest" else _Negative(op), random_normal(op, generator))
    limit = min(max_iter, op.dim)
    while True:
        krylov.step()
        done = krylov.num_steps >= k and _converged(krylov, k, tol)
        if done or krylov.num_steps == limit:
            break
        if krylov.invariant:
            krylov.restart(lambda: random_normal(op, generator))
    values, inner, residuals = (part[..., :k].copy() for part in krylov.ritz())
    if not done:
        worst = float(np.max(residuals / np.maximum(np.abs(values), np.finfo(float).tiny)))
        warnings.warn(
            f"top_eigenvalues did not converge in {limit} products: the worst relative residual is {worst:.1e}, "
            f"tol is {tol:.1e}. Raise max_iter or tol.",
            RuntimeWarning,
            stacklevel=2,
        )
    vectors = krylov.basis.T @ torch.from_numpy(inner).to(op.device, op.dtype)
    return Eigenvalues(values if which == "largest" else -values, vectors, residuals, done, krylov.num_steps)


class _Negative:
    """Minus an operator: its largest eigenvalues are the smallest ones, negated."""

    def __init__(self, op: Operator) -> None:
        self.op, self.dim, self.dtype, self.device = op, op.dim, op.dtype, op.device

    def __matmul__(self, v: Tensor) -> Tensor:
        return -(self.op @ v)


def _converged(krylov: Krylov, k: int, tol: float) -> bool:
    if krylov.num_steps == krylov.op.dim:
        return True
    values, _, residuals = krylov.ritz()
    if np.any(residuals[:k] > np.maximum(tol * np.abs(values[:k]), krylov.rounding)):
        return False
    if len(krylov.starts) == 1:
        # A space that closed may lack a second copy of an eigenvalue: look into the complement first.
        return not krylov.invariant
    leading, residual = krylov.leader()
    return residual <= max(tol * abs(leading), krylov.rounding) and leading <= values[k - 1] + krylov.rounding


@dataclass(frozen=True)
class SpectralDensity:
    r"""The spectrum as a weighted sum of points, :math:`\phi(t) = \sum_i weights_i\, \delta(t - nodes_i)`."""

    nodes: np.ndarray
    """Where the points are, ascending."""
    weights: np.ndarray
    """How much of the spectrum each point has; they sum to 1."""

    def density(self, grid: np.ndarray, sigma: float) -> np.ndarray:
        r"""Return :math:`\sum_i weights_i\, \mathcal N(t; nodes_i, \sigma^2)` at every t of the grid."""
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma!r}. Try 1 % of the range of the nodes.")
        z = (np.asarray(grid, dtype=float)[:, None] - self.nodes) / sigma
        return np.asarray(np.exp(-0.5 * z**2) @ self.weights / (sigma * math.sqrt(2 * math.pi)))

    def plot(self, sigma: float | None = None) -> "plots.Figure":
        """Return a matplotlib figure of the density on a logarithmic scale."""
        return plots.spectral_density(self, sigma)


def spectral_density(op: Operator, *, steps: int = 80, probes: int = 4, seed: int = 0) -> SpectralDensity:
    r"""Return the spectral density by stochastic Lanczos quadrature (Ghorbani et al., 2019; Section 4.2).

    For a random vector z, :math:`z^\top f(H) z` is the sum of :math:`f(\theta_i) \tau_i^2` over the Ritz
    values, with the first components :math:`\tau_i` of their vectors, exactly for polynomials of degree up to
    2 steps - 1; the mean over z is the trace of f(H). The probes are random signs, so their weights are
    exact for a diagonal Hessian.

    Args:
        op: a :class:`flatmin.HessianOperator` or :class:`flatmin.GGNOperator`, or anything symmetric with ``dim``,
            ``dtype``, ``device`` and ``@``.
        steps: products for each probe (fewer where the Krylov space closes).
        probes: how many random vectors.
        seed: of the random vectors.

    Example:
        >>> from flatmin.measures import HessianOperator
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> op = HessianOperator(model, half_square, [(torch.diag(torch.tensor([2.0, 4.0])), torch.zeros(2))])
        >>> result = spectral_density(op, probes=1)
        >>> result.nodes.round(3).tolist(), result.weights.round(3).tolist()
        ([2.0, 8.0], [0.5, 0.5])
    """
    check_operator(op)
    check_count("steps", steps)
    check_count("probes", probes)
    generator = torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(probes):
        krylov = Krylov(op, random_signs(op, generator))
        krylov.step()
        while krylov.num_steps < min(steps, op.dim) and not krylov.invariant:
            krylov.step()
        values, vectors, _ = krylov.ritz()
        nodes.append(values)
        weights.append(vectors[0] ** 2 / probes)
    order = np.argsort(np.concatenate(nodes), kind="stable")
    return SpectralDensity(np.concatenate(nodes)[order], np.concatenate(weights)[order])
