"""The generalized Gauss-Newton matrix of a loss on fixed data: its Hessian without the model's own curvature."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatmin.measures.batches import Batch, tree_map
from flatmin.measures.batches import leaves as tensors_of
from flatmin.measures.curvature import CurvatureOperator, Product, derivative


class GGNOperator(CurvatureOperator):
    r"""The generalized Gauss-Newton matrix of the mean loss over all data, as its products with vectors.

    With the outputs :math:`z_i` of example i and their Jacobian :math:`J_i` in the weights it is

    .. math:: G = \frac{1}{n} \sum_i J_i^\top \, \nabla^2_z \ell(z_i, y_i) \, J_i
        = \nabla^2 L_S - \frac{1}{n} \sum_i \sum_c \frac{\partial \ell}{\partial z_{ic}} \nabla^2_w z_{ic} .

    It has no negative eigenvalues if the loss is convex in the outputs, as cross-entropy and squared errors are,
    and it equals the Hessian where the model is linear in its weights or fits every target exactly (Schraudolph,
    2002). For cross-entropy on logits it is the Fisher matrix.

    Products are exact, and batches and graphs are treated as by :class:`flatmin.HessianOperator`. The matrix
    depends on what the model returns: ``loss_fn`` must compute the whole loss from the outputs.

    Args:
        model: any module, left as it was; its outputs may be a tensor, or tuples, lists and dicts of them.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        params: restricts the matrix to these parameters (or names): one block on its diagonal.
        group: each rank holds a shard of the data; products are for the whole.
        allow_nondeterministic: allow a random model or random data.

    Attributes:
        dim: the number of weights, which vectors run over, flattened in the order of ``model.parameters()``.
        dtype: of the vectors: float32, or float64 for a float64 model.
        device: of the vectors.

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
            pushed = derivative(pulled, u, direction, keep=True)
            bent = derivative(loss_grads, z_copies, pushed, keep=keep)
            return torch.autograd.grad(z, leaves, bent, retain_graph=keep, materialize_grads=True)

        return product
