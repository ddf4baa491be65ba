"""The Hessian of a loss on fixed data: its products with vectors, and its trace (Section 4.2)."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.measures.batches import Batch, measuring, pieces
from flatmin.measures.checks import check_count
from flatmin.measures.lanczos import random_signs
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten, unflatten


class HessianOperator:
    r"""The Hessian :math:`\nabla^2 L_S(w)` of the mean loss over all data, as its products with vectors.

    Products are exact: batches are weighted by their sizes, and there are no finite differences. With one
    batch the graph of the gradient is built once and kept (and rebuilt when a weight or a buffer has
    changed); with several, each product rebuilds it, one batch at a time.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        params: restricts the Hessian to these parameters (or names): one block on its diagonal.
        group: each rank holds a shard of the data; products are those of the whole.
        allow_nondeterministic: allow a random model or random data.

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
            raise ValueError(f"The Hessian has products with tensors ({self.dim},) or ({self.dim}, k), got {shape}.")
        if v.ndim == 2:
            return torch.stack([self @ column for column in v.unbind(1)], dim=1)
        objective = self._objective
        weights = objective.weights()
        direction = unflatten(v.detach().to(self.device, self.dtype), weights)
        total = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        # Fused attention has no second derivative.
        with measuring(objective.data), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            if objective.num_batches == 1:
                total += self._graph(weights).product(direction) * objective.num_local
            else:
                for batch, num in pieces(objective.data, None):
                    leaves = [w.detach().requires_grad_() for w in weights]
                    grads = _gradient_with_graph(objective, leaves, batch)
                    total.add_(flatten(_product(grads, leaves, direction, keep=False), self.dtype), alpha=num)
        return objective.reduced(total).div_(objective.num_examples)

    def _graph(self, weights: list[Tensor]) -> "_KeptGraph":
        state = list(self._objective.state(weights).values())
        if self._kept is None or not self._kept.valid_for(state):
            self._kept = None  # frees the old graph before the new one is built
            self._kept = _KeptGraph(self._objective, weights, state)
        return self._kept

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


class _KeptGraph:
    """The gradient on one batch with its graph, at copies of the weights: the model's own may change."""

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
