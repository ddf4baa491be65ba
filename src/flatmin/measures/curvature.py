"""The curvature of a loss on fixed data: its Hessian, its Gauss-Newton matrix, and how much it turns SAM's update."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.core.checks import check_rho
from flatmin.core.gradient import sam_gradient
from flatmin.measures.batches import Batch, measuring, pieces, tree_map
from flatmin.measures.batches import leaves as tensors_of
from flatmin.measures.checks import check_count
from flatmin.measures.lanczos import random_signs
from flatmin.measures.objective import LossFn, Objective
from flatmin.measures.parameters import Params, flatten, unflatten

Product = Callable[[Sequence[Tensor], bool], Sequence[Tensor]]
"""``product(direction, keep)`` on one batch; ``keep`` leaves its graph for another one."""

Self = TypeVar("Self", bound="CurvatureOperator")


class CurvatureOperator(ABC):
    """What the Hessian and the Gauss-Newton matrix have in common: all but the product on one batch."""

    dim: int
    """The number of weights, which vectors run over, flattened in the order of ``model.parameters()``."""
    dtype: torch.dtype
    """Of the vectors: float32, or float64 for a float64 model."""
    device: torch.device
    """Of the vectors."""

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
        """Check the model and the data.

        Args:
            model: any module, left as it was.
            loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
            data: an iterable of ``(inputs, targets)`` batches.
            params: restricts the matrix to these parameters (or names): one block on its diagonal.
            group: each rank holds a shard of the data; products are with the matrix of all data.
            allow_nondeterministic: allow a random model or random data.
        """
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


class HessianOperator(CurvatureOperator):
    r"""The Hessian :math:`\nabla^2 L_S(w)` of the mean loss over all data, as its products with vectors.

    Products are exact: batches are weighted by their sizes, and there are no finite differences. With one
    batch the graph of the gradient is built once and kept (and rebuilt when a weight or a buffer has
    changed); with several, each product rebuilds it, one batch at a time.

    Example:
        The mean of (w x)^2 / 2 over x = 1 and x = 3 has the second derivative (1 + 9) / 2.

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> op = HessianOperator(model, half_square, [(torch.tensor([[1.0], [3.0]]), torch.zeros(2))])
        >>> op @ torch.ones(1)
        tensor([5.])
        >>> op.trace()
        5.0
    """

    def _product_on(self, batch: Batch, leaves: list[Tensor]) -> Product:
        loss, _, _ = self._objective.differentiable(leaves, batch)
        grads = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        return lambda direction, keep: _derivative(grads, leaves, direction, keep=keep)


class GGNOperator(CurvatureOperator):
    r"""The generalized Gauss-Newton matrix of the mean loss over all data, as its products with vectors.

    With the outputs :math:`z_i` of example i and their Jacobian :math:`J_i` in the weights it is

    .. math:: G = \frac{1}{n} \sum_i J_i^\top \, \nabla^2_z \ell(z_i, y_i) \, J_i
        = \nabla^2 L_S - \frac{1}{n} \sum_i \sum_c \frac{\partial \ell}{\partial z_{ic}} \nabla^2_w z_{ic} .

    It has no negative eigenvalues if the loss is convex in the outputs, as cross-entropy and squared errors are,
    and it equals the Hessian where the model is linear in its weights or fits every target exactly (Schraudolph,
    2002). For cross-entropy on logits it is the Fisher matrix.

    Products are exact, and batches and graphs are treated as by :class:`flatmin.HessianOperator`. The matrix
    depends on what the model returns, a tensor, or tuples, lists and dicts of tensors: ``loss_fn`` must compute the
    whole loss from it.

    Raises:
        ValueError: in a product, if the loss is linear in the outputs: the matrix would be zero.

    Example:
        The loss (w^2 x - y)^2 / 2 at w = 1, x = 1, y = 0 has J = 2 w x = 2, so G = 4; its Hessian is
        6 w^2 x^2 = 6.

        >>> class Square(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.ones(1))
        ...
        ...     def forward(self, x):
        ...         return self.w**2 * x
        >>> half_square = lambda outputs, targets: ((outputs - targets) ** 2).mean() / 2
        >>> GGNOperator(Square(), half_square, [(torch.ones(1), torch.zeros(1))]).trace()
        4.0
    """

    def _product_on(self, batch: Batch, leaves: list[Tensor]) -> Product:
        objective = self._objective
        _, outputs, targets = objective.differentiable(leaves, batch, linear=True)
        # The loss sees copies: one output may be computed from another, and its path through the model is J's.
        copies = tree_map(lambda z: z.detach().requires_grad_(z.requires_grad), outputs)
        z, z_copies = ([t for t in tensors_of(tree) if t.requires_grad] for tree in (outputs, copies))
        loss_grads: tuple[Tensor, ...] = ()
        if z:
            loss = objective.loss_fn(copies, targets)
            loss_grads = torch.autograd.grad(loss, z_copies, create_graph=True, materialize_grads=True)
        if not any(g.requires_grad for g in loss_grads):
            raise ValueError(
                "The loss is linear in the model's outputs, so its Gauss-Newton matrix is zero. The model must return "
                "predictions, such as logits, as tensors, and loss_fn(outputs, targets) compute the loss from them."
            )
        # J^T u is linear in u, whatever u is: its derivative in the direction v is J v.
        u = [torch.zeros_like(t, requires_grad=True) for t in z]
        pulled = torch.autograd.grad(z, leaves, u, create_graph=True, materialize_grads=True)

        def product(direction: Sequence[Tensor], keep: bool) -> tuple[Tensor, ...]:
            pushed = _derivative(pulled, u, direction, keep=True)
            bent = _derivative(loss_grads, z_copies, pushed, keep=keep)
            return torch.autograd.grad(z, leaves, bent, retain_graph=keep, materialize_grads=True)

        return product


def sam_update_cosine(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    rho: float,
    weight_decay: float = 0.0,
    params: Params | None = None,
    allow_nondeterministic: bool = False,
) -> float:
    r"""Return the cosine between SAM's update and the exact gradient of :math:`L(w + \hat\epsilon(w))`.

    SAM takes :math:`\hat\epsilon = \rho g / \lVert g \rVert` for a constant and descends along
    :math:`v = \nabla L(w + \hat\epsilon)`. The exact gradient is :math:`v + H u` with
    :math:`u = \frac{\rho}{\lVert g \rVert} (v - \hat g \langle \hat g, v \rangle)` and the Hessian H at w.
    Appendix C.4 reports the cosine of the two along training: near 1 at first, less near convergence.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        batch: ``(inputs, targets)``.
        rho: the radius of the neighborhood.
        weight_decay: adds :math:`\frac{\lambda}{2} \lVert w \rVert^2` to the loss, for training that has it there.
        params: restricts the update to these parameters (or names).
        allow_nondeterministic: allow a random model; both updates see the same noise.

    Raises:
        ValueError: if rho < 0, or an update is zero or not finite: it has no direction.

    Example:
        For L(w) = w^2 / 2 in one dimension the second-order term vanishes.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> sam_update_cosine(model, half_square, (torch.ones(4, 1), torch.zeros(4)), rho=0.1)
        1.0
    """
    check_rho(rho)
    objective = Objective(model, loss_fn, [batch], params=params, allow_nondeterministic=allow_nondeterministic)

    def loss(weights: list[Tensor]) -> Tensor:
        penalty = sum(w.square().sum() for w in weights) if weight_decay else 0.0
        return objective.differentiable(weights, batch)[0] + weight_decay / 2 * penalty

    # Fused attention has no second derivative.
    with measuring(), sdpa_kernel(SDPBackend.MATH):
        first, second = (
            sam_gradient(loss, objective.weights(), rho=rho, second_order=exact).grads for exact in (False, True)
        )
    a, b = flatten(first, torch.float64), flatten(second, torch.float64)
    lengths = float(a.norm()), float(b.norm())
    if not all(math.isfinite(length) and length > 0 for length in lengths):
        raise ValueError(f"An update has no direction: the norms of the two are {lengths[0]:g} and {lengths[1]:g}.")
    return max(-1.0, min(1.0, float(a @ b) / (lengths[0] * lengths[1])))


def _derivative(
    values: Sequence[Tensor], leaves: Sequence[Tensor], direction: Sequence[Tensor], *, keep: bool
) -> Sequence[Tensor]:
    """Differentiate <values, direction>; a value without a graph is constant in the leaves."""
    pairs = [(value, v) for value, v in zip(values, direction, strict=True) if value.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, vectors = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, vectors, retain_graph=keep, materialize_grads=True)
