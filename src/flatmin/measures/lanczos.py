r"""Lanczos' method with two-pass reorthogonalization: a symmetric operator as a small tridiagonal matrix.

After j steps :math:`H Q_j = Q_j T_j + \beta_j q_{j+1} e_j^\top` with orthonormal columns in :math:`Q_j`.
Without reorthogonalization Q loses that as soon as an eigenvalue converges, and T shows copies ("ghosts") of
it. Subtracting the projection on all earlier vectors twice keeps it to rounding (Giraud et al., 2005), at a
cost that is small compared with a Hessian-vector product.
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ROUNDING = 100.0  # what lies below this many epsilons of the largest number seen is taken for rounding


class Operator(Protocol):
    """A symmetric matrix, known by its products."""

    dim: int
    dtype: torch.dtype
    device: torch.device

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return the product with a vector."""


class Krylov:
    """The basis, and the tridiagonal matrix in it, that grow by one with every step.

    Attributes:
        alphas: the diagonal, float64.
        betas: the off-diagonal, float64; the last one belongs to the next vector.
        starts: at which steps a block starts: 0, and one more after every invariant subspace.
    """

    def __init__(self, op: Operator, start: Tensor) -> None:
        self.op = op
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.starts = [0]
        self._basis = torch.empty(min(16, op.dim), op.dim, dtype=op.dtype, device=op.device)
        self._basis[0] = start / torch.linalg.vector_norm(start)

    @property
    def num_steps(self) -> int:
        """The size of the tridiagonal matrix."""
        return len(self.alphas)

    @property
    def basis(self) -> Tensor:
        """The orthonormal vectors, one in a row."""
        return self._basis[: self.num_steps]

    @property
    def scale(self) -> float:
        """The largest number in the tridiagonal matrix: an estimate of the operator's norm."""
        return max(map(abs, self.alphas + self.betas), default=0.0)

    @property
    def rounding(self) -> float:
        """What is taken for zero."""
        return ROUNDING * torch.finfo(self.op.dtype).eps * self.scale

    def step(self) -> None:
        """Take one product with the operator. The next vector waits until :meth:`step` is called again."""
        j = self.num_steps
        q = self._basis[j]
        w = self.op @ q
        alpha = float(q @ w)
        self.alphas.append(alpha)
        w = self._orthogonalized(w)
        beta = float(torch.linalg.vector_norm(w))
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise ValueError(f"The Hessian-vector product is not finite (step {j + 1}): there is no spectrum.")
        self.betas.append(beta)
        if beta <= self.rounding or j + 1 == self.op.dim:
            self.betas[-1] = 0.0
        else:
            self._append(w / beta)

    @property
    def invariant(self) -> bool:
        """Whether the basis spans an invariant subspace, in which the tridiagonal matrix is exact."""
        return self.betas[-1] == 0.0

    def restart(self, draw: Callable[[], Tensor]) -> None:
        """Go on in the complement of an invariant subspace, from a random vector."""
        w = self._orthogonalized(draw())
        self._append(w / torch.linalg.vector_norm(w))
        self.starts.append(self.num_steps)

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the Ritz values, descending, their vectors in the basis (columns), and residual norms."""
        values, vectors = _tridiagonal_eigenpairs(np.array(self.alphas), np.array(self.betas[:-1]))
        values, vectors = values[::-1], vectors[:, ::-1]
        return values, vectors, np.abs(vectors[-1]) * self.betas[-1]

    def leader(self) -> tuple[float, float]:
        """Return the largest Ritz value of the last block, and its residual."""
        first = self.starts[-1]
        values, vectors = _tridiagonal_eigenpairs(np.array(self.alphas[first:]), np.array(self.betas[first:-1]))
        return float(values[-1]), float(abs(vectors[-1, -1]) * self.betas[-1])

    def _orthogonalized(self, w: Tensor) -> Tensor:
        for _ in range(2):
            w = w - self.basis.T @ (self.basis @ w)
        return w

    def _append(self, q: Tensor) -> None:
        j = self.num_steps
        if j == len(self._basis):
            grown = torch.empty(min(2 * j, self.op.dim), self.op.dim, dtype=q.dtype, device=q.device)
            grown[:j] = self._basis
            self._basis = grown
        self._basis[j] = q


def random_normal(op: Operator, generator: torch.Generator) -> Tensor:
    """Return a Gaussian vector, drawn on the CPU so that every device gets the same."""
    return torch.randn(op.dim, generator=generator, dtype=torch.float64).to(op.dtype).to(op.device)


def random_signs(op: Operator, generator: torch.Generator) -> Tensor:
    """Return a vector of random signs, drawn on the CPU so that every device gets the same."""
    return (2 * torch.randint(2, (op.dim,), generator=generator) - 1).to(op.dtype).to(op.device)


def _tridiagonal_eigenpairs(diagonal: np.ndarray, off_diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from scipy.linalg import eigh_tridiagonal  # imported when used: SciPy takes a second to import

    values, vectors = eigh_tridiagonal(diagonal, off_diagonal)
    return values, vectors
