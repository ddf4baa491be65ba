"""A curvature matrix of a loss on fixed data, known by its products with vectors; and its trace."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.measures.batches import Batch, measuring, pieces
from flatmin.measures.checks import check_count
from flatmin.measures.lanczos import random_signs
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten, unflatten

Product = Callable[[Sequence[Tensor], bool], Sequence[Tensor]]
"""``product(direction, keep)`` on one batch; ``keep`` leaves its graph for another one."""

Self = TypeVar("Self", bound="CurvatureOperator")


class CurvatureOperator(ABC):
    """What the Hessian and the Gauss-Newton matrix have in common: all but the product on one batch."""

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
            Objective(model, loss_fn, data, params=params, group=group, allow_nondeterministic=allow_nondeterministic)
        )

    @classmethod
    def of(cls: type[Self], objective: Objective) -> Self:
        """Return the operator of an objective that was already checked."""
        op = cls.__new__(cls)
        op._use(objective)
        return op

    def _use(self, objective: Objective) -> None:
        self._objective = objective
        self.dim = sum(w.numel() for w in objective.weights())
        self.dtype = objective.dtype
        self.device = objective.device
        self._kept: tuple[list[Tensor], Product] | None = None

    @abstractmethod
    def _product_on(self, batch: Batch, leaves: list[Tensor]) -> Product:
        """Build the graph of one batch at these leaves, and return the products by it."""

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return the product with a vector (dim,), or with the columns of a matrix (dim, k)."""
        if not isinstance(v, Tensor) or v.ndim not in (1, 2) or len(v) != self.dim:
            shape = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            name = type(self).__name__
            raise ValueError(f"{name} has products with tensors ({self.dim},) or ({self.dim}, k), got {shape}.")
        if v.ndim == 2:
            return torch.stack([self @ column for column in v.unbind(1)], dim=1)
        objective = self._objective
        weights = objective.weights()
        direction = unflatten(v.detach().to(self.device, self.dtype), weights)
        total = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        # Fused attention has no second derivative.
        with measuring(objective.data), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            if objective.num_batches == 1:
                product = self._kept_product(weights)
                total.add_(flatten(product(direction, True), self.dtype), alpha=objective.num_local)
            else:
                for batch, num in pieces(objective.data, None):
                    product = self._product_on(batch, [w.detach().requires_grad_() for w in weights])
                    total.add_(flatten(product(direction, False), self.dtype), alpha=num)
        return objective.reduced(total).div_(objective.num_examples)

    def _kept_product(self, weights: list[Tensor]) -> Product:
        """Return the products on the only batch, at copies of the weights: the model's own may change."""
        state = list(self._objective.state(weights).values())
        # Compared by value: an edit through `.data` leaves no trace in the version counter.
        if self._kept is None or not all(map(torch.equal, self._kept[0], state)):
            self._kept = None  # frees the old graph before the new one is built
            (batch,) = [piece for piece, _ in pieces(self._objective.data, None)]
            leaves = [w.clone().requires_grad_() for w in weights]
            self._kept = [t.clone() for t in state], self._product_on(batch, leaves)
        return self._kept[1]

    def trace(self, probes: int = 100, seed: int = 0) -> float:
        r"""Return the trace, the mean of :math:`z^\top H z` over vectors of random signs (Hutchinson, 1989).

        Where there are no more weights than probes, unit vectors in place of z give it exactly.
        """
        check_count("probes", probes)
        if self.dim <= probes:
            units = torch.eye(self.dim, dtype=self.dtype, device=self.device)
            return math.fsum(float((self @ unit) @ unit) for unit in units)
        generator = torch.Generator().manual_seed(seed)
        signs = [random_signs(self, generator) for _ in range(probes)]
        return math.fsum(float(z @ (self @ z)) for z in signs) / probes


def derivative(
    values: Sequence[Tensor], leaves: Sequence[Tensor], direction: Sequence[Tensor], *, keep: bool
) -> Sequence[Tensor]:
    """Differentiate <values, direction>; a value without a graph is constant in the leaves."""
    pairs = [(value, v) for value, v in zip(values, direction, strict=True) if value.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, vectors = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, vectors, retain_graph=keep, materialize_grads=True)
