r"""The Hessian of a loss on fixed data: products, leading eigenvalues, trace and spectral density (Section 4.2)."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.measures import plots
from flatmin.measures.batches import Batch, pieces, rng_kept
from flatmin.measures.lanczos import Krylov, Operator
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten, unflatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HessianOperator:
    r"""The Hessian :math:`\nabla^2 L_S(w)` of the mean loss over all data, known by its products with vectors.

    Products are exact: batches are weighted by their sizes, and there are no finite differences. With one
    batch the graph of the gradient is built once and kept (and rebuilt when a weight or a buffer has
    changed); with several, each product builds it anew, one batch at a time.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        params: restricts the Hessian to these parameters (or names): one block on its diagonal.
        group: each rank holds a shard of the data; products are those of the whole.
        allow_nondeterministic: do not refuse a random model or data.

    Attributes:
        dim: the number of weights, which vectors run over, flattened in the order of ``model.parameters()``.
        dtype: of the vectors: float32, or float64 for a float64 model.
        device: of the vectors.

    Example:
        The mean of (w x)^2 / 2 over x = 1 and x = 3 has the second derivative (1 + 9) / 2.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> op = HessianOperator(model, half_square, [(torch.tensor([[1.0], [3.0]]), torch.zeros(2))])
        >>> op @ torch.ones(1)
        tensor([5.])
        >>> op.trace()
        5.0
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Iterable[Batch],
        *,
        params: Params | None = None,
        group: dist.ProcessGroup | None = None,
        allow_nondeterministic: bool = False,
    ) -> None:
        self._use(
            Objective(
                model,
                loss_fn,
                data,
                params=params,
                group=group,
                allow_nondeterministic=allow_nondeterministic,
            )
        )

    @classmethod
    def of(cls, objective: Objective) -> "HessianOperator":
        """Return the Hessian of an objective that was already checked."""
        op = cls.__new__(cls)
        op._use(objective)
        return op

    def _use(self, objective: Objective) -> None:
        self._objective = objective
        self.dim = sum(w.numel() for w in objective.weights())
        self.dtype = objective.dtype
        self.device = objective.device
        self._kept: _KeptGraph | None = None

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return the product with a vector (dim,), or with the columns of a matrix (dim, k)."""
        if not isinstance(v, Tensor) or v.ndim not in (1, 2) or len(v) != self.dim:
            shape = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise ValueError(
                f"The Hessian has products with tensors ({self.dim},) or ({self.dim}, k), got {shape}."
            )
        if v.ndim == 2:
            return torch.stack([self @ column for column in v.unbind(1)], dim=1)
        objective = self._objective
        weights = objective.weights()
        direction = unflatten(v.detach().to(self.device, self.dtype), weights)
        total = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        # Fused attention has no second derivative.
        with rng_kept(objective.data), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            if objective.num_batches == 1:
                total += self._graph(weights).product(direction) * objective.num_local
            else:
                for batch, num in pieces(objective.data, None):
                    leaves = [w.detach().requires_grad_() for w in weights]
                    grads = _gradient_with_graph(objective, leaves, batch)
                    total.add_(flatten(_product(grads, leaves, direction, keep=False), self.dtype), alpha=num)
        return objective.reduced(total).div_(objective.num_examples)

    def _graph(self, weights: list[Tensor]) -> "_KeptGraph":
        state = objective_state(self._objective, weights)
        if self._kept is None or not self._kept.valid_for(state):
            self._kept = None  # frees the old graph before the new one is built
            self._kept = _KeptGraph(self._objective, weights, state)
        return self._kept

    def trace(self, probes: int = 100, seed: int = 0) -> float:
        r"""Return the trace: :math:`\frac{1}{s} \sum_i z_i^\top H z_i` over random signs z (Hutchinson, 1989).

        Where there are no more weights than probes, unit vectors in place of z give it exactly.
        """
        _check_positive("probes", probes)
        if self.dim <= probes:
            units = torch.eye(self.dim, dtype=self.dtype, device=self.device)
            return math.fsum(float((self @ unit) @ unit) for unit in units)
        generator = torch.Generator().manual_seed(seed)
        signs = [random_signs(self, generator) for _ in range(probes)]
        return math.fsum(float(z @ (self @ z)) for z in signs) / probes


class _KeptGraph:
    """The gradient on one batch with its graph, at copies of the weights: the model's own may be edited meanwhile."""

    def __init__(self, objective: Objective, weights: list[Tensor], state: list[Tensor]) -> None:
        self._state = [t.clone() for t in state]
        self._leaves = [w.clone().requires_grad_() for w in weights]
        (batch,) = [piece for piece, _ in pieces(objective.data, None)]
        self._grads = _gradient_with_graph(objective, self._leaves, batch)
        self._dtype = objective.dtype

    def valid_for(self, state: list[Tensor]) -> bool:
        # By value: an edit through `.data` leaves no trace in the version counter.
        return all(torch.equal(a, b) for a, b in zip(self._state, state, strict=True))

    def product(self, direction: list[Tensor]) -> Tensor:
        return flatten(_product(self._grads, self._leaves, direction, keep=True), self._dtype)


def objective_state(objective: Objective, weights: list[Tensor]) -> list[Tensor]:
    """Return every tensor on which the loss depends."""
    return list(objective.state(weights).values())


def _gradient_with_graph(objective: Objective, leaves: list[Tensor], batch: Batch) -> Sequence[Tensor]:
    loss = objective.loss(leaves, batch)
    return torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)


def _product(
    grads: Sequence[Tensor], leaves: Sequence[Tensor], direction: Sequence[Tensor], *, keep: bool
) -> Sequence[Tensor]:
    """Differentiate <grads, direction>; a gradient without a graph is constant in the weights."""
    pairs = [(g, v) for g, v in zip(grads, direction, strict=True) if g.requires_grad]
    if not pairs:
        return [torch.zeros_like(w) for w in leaves]
    outputs, vectors = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, vectors, retain_graph=keep, materialize_grads=True)


@dataclass(frozen=True)
class Eigenvalues:
    r"""Leading eigenvalues and their vectors.

    Attributes:
        values: the k largest, algebraically, in descending order; float64.
        vectors: of norm 1, in the columns of a tensor (dim, k).
        residuals: :math:`\lVert H v - \lambda v \rVert_2` of each pair, by Lanczos' recurrence.
        converged: whether every residual is below tol times the eigenvalue's magnitude (or at rounding).
        num_products: how many Hessian-vector products it took.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    converged: bool
    num_products: int

    def ratio(self, first: int, second: int) -> float:
        r"""Return :math:`\lambda_{first} / \lambda_{second}`, counted from 1; ``ratio(1, 5)`` is the paper's proxy."""
        for name, index in (("first", first), ("second", second)):
            if not 1 <= index <= len(self.values):
                raise ValueError(
                    f"{name} must be in 1..{len(self.values)} (eigenvalues count from 1), got {index}."
                )
        return float(self.values[first - 1] / self.values[second - 1])

    def plot(self) -> "Figure":
        """Return a matplotlib figure of the eigenvalues, with their residuals as error bars."""
        return plots.eigenvalues(self)


def top_eigenvalues(
    op: Operator, k: int = 5, *, tol: float = 1e-3, max_iter: int = 200, seed: int = 0
) -> Eigenvalues:
    r"""Return the k largest eigenvalues, by Lanczos' method with two-pass reorthogonalisation.

    It stops as soon as every residual :math:`\lVert H v - \lambda v \rVert` is at most
    :math:`tol\,|\lambda|`, which bounds the error of the eigenvalue by the same (and, where it is isolated,
    by its square over the gap). When the Krylov space closes early, the search goes on in its complement, so
    that multiple eigenvalues found there count as often as they occur. It keeps one vector of ``op.dim``
    numbers for each product.

    Args:
        op: a :class:`HessianOperator`, or anything symmetric with ``dim``, ``dtype``, ``device`` and ``@``.
        k: how many.
        tol: the residual to reach, relative to the eigenvalue.
        max_iter: the largest number of products.
        seed: of the random first vector.

    Raises:
        ValueError: if k or max_iter is out of range, or a product is not finite.

    Warns:
        RuntimeWarning: if max_iter products did not suffice; the best values found are returned.

    Example:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> data = [(torch.diag(torch.tensor([3.0, 6.0, 9.0])), torch.zeros(3))]
        >>> found = top_eigenvalues(HessianOperator(model, half_square, data), k=2)
        >>> found.values.round(3).tolist(), round(found.ratio(1, 2), 3)
        ([27.0, 12.0], 2.25)
    """
    _check_positive("k", k)
    _check_positive("max_iter", max_iter)
    if k > op.dim:
        raise ValueError(f"k must be at most the number of weights, {op.dim}, got {k}.")
    if max_iter < k:
        raise ValueError(
            f"max_iter must be at least k = {k}: every eigenvalue takes a product, got {max_iter}."
        )
    if not tol > 0:
        raise ValueError(f"tol must be positive, got {tol!r}; 1e-3 is the default.")
    generator = torch.Generator().manual_seed(seed)
    krylov = Krylov(op, random_normal(op, generator))
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
    return Eigenvalues(values, vectors, residuals, done, krylov.num_steps)


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
    r"""The spectrum as a weighted sum of points, :math:`\phi(t) = \sum_i weights_i\, \delta(t - nodes_i)`.

    Attributes:
        nodes: where (ascending).
        weights: how much of the spectrum; they sum to 1.
    """

    nodes: np.ndarray
    weights: np.ndarray

    def density(self, grid: np.ndarray, sigma: float) -> np.ndarray:
        r"""Return :math:`\sum_i weights_i\, \mathcal N(t; nodes_i, \sigma^2)` at every t of the grid."""
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma!r}. Try 1 % of the range of the nodes.")
        z = (np.asarray(grid, dtype=float)[:, None] - self.nodes) / sigma
        return np.exp(-0.5 * z**2) @ self.weights / (sigma * math.sqrt(2 * math.pi))

    def plot(self, sigma: float | None = None) -> "Figure":
        """Return a matplotlib figure of the density on a logarithmic scale."""
        return plots.spectral_density(self, sigma)


def spectral_density(op: Operator, *, steps: int = 80, probes: int = 4, seed: int = 0) -> SpectralDensity:
    r"""Return the spectral density by stochastic Lanczos quadrature (Ghorbani et al., 2019; Section 4.2).

    For a random vector z, :math:`z^\top f(H) z` is the sum of :math:`f(\theta_i) \tau_i^2` over the Ritz
    values, with the first components :math:`\tau_i` of their vectors, exactly for polynomials of degree up to
    2 steps - 1; the mean over z is the trace of f(H). The probes are random signs, so that their weights are
    exact for a diagonal Hessian.

    Args:
        op: a :class:`HessianOperator`, or anything symmetric with ``dim``, ``dtype``, ``device`` and ``@``.
        steps: products for each probe (fewer where the Krylov space closes).
        probes: how many random vectors.
        seed: of the random vectors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> op = HessianOperator(model, half_square, [(torch.diag(torch.tensor([2.0, 4.0])), torch.zeros(2))])
        >>> found = spectral_density(op, probes=1)
        >>> found.nodes.round(3).tolist(), found.weights.round(3).tolist()
        ([2.0, 8.0], [0.5, 0.5])
    """
    _check_positive("steps", steps)
    _check_positive("probes", probes)
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


def random_normal(op: Operator, generator: torch.Generator) -> Tensor:
    """Return a Gaussian vector, drawn on the CPU so that every device gets the same."""
    return torch.randn(op.dim, generator=generator, dtype=torch.float64).to(op.dtype).to(op.device)


def random_signs(op: Operator, generator: torch.Generator) -> Tensor:
    """Return a vector of random signs, drawn on the CPU so that every device gets the same."""
    return (2 * torch.randint(2, (op.dim,), generator=generator) - 1).to(op.dtype).to(op.device)


def _check_positive(name: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name} must be an integer, got {count!r} of type {type(count).__name__}.")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}.")
