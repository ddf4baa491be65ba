"""The Hessian of a loss on fixed data (Section 4.2)."""

import torch
from torch import Tensor

from flatmin.measures.batches import Batch
from flatmin.measures.curvature import CurvatureOperator, Product, derivative


class HessianOperator(CurvatureOperator):
    r"""The Hessian :math:`\nabla^2 L_S(w)` of the mean loss over all data, as its products with vectors.

    Products are exact: batches are weighted by their sizes, and there are no finite differences. With one
    batch the graph of the gradient is built once and kept (and rebuilt when a weight or a buffer has
    changed); with several, each product rebuilds it, one batch at a time.

    Args:
        model: any module, left as it was.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        params: restricts the Hessian to these parameters (or names): one block on its diagonal.
        group: each rank holds a shard of the data; products are with the whole Hessian.
        allow_nondeterministic: allow a random model or random data.

    Attributes:
        dim: the number of weights, which vectors run over, flattened in the order of ``model.parameters()``.
        dtype: of the vectors: float32, or float64 for a float64 model.
        device: of the vectors.

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
        return lambda direction, keep: derivative(grads, leaves, direction, keep=keep)
