"""Directions in which to look at a loss landscape."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatmin.measures.hessian import HessianOperator
from flatmin.measures.objective import Objective
from flatmin.measures.parameters import unflatten
from flatmin.measures.spectrum import top_eigenvalues


def random_directions(
    weights: Sequence[Tensor], num: int, *, seed: int = 0, move_1d: bool = False
) -> list[list[Tensor]]:
    r"""Return Gaussian directions, normalized per filter: :math:`d_i \lVert w_i \rVert / \lVert d_i \rVert`.

    A filter is a slice along dimension 0: the weights of one output (Li et al., 2018, Section 4). Biases and
    the weights of norm layers (one dimension or none) stay where they are, or count as one filter each if
    ``move_1d``. The same seed gives parallel filters for every model of the same shape, on every device.

    Example:
        >>> ((direction,),) = random_directions([torch.tensor([[3.0, 4.0], [0.0, 2.0]])], 1)
        >>> direction.norm(dim=1)
        tensor([5., 2.])
    """
    generator = torch.Generator().manual_seed(seed)
    directions = []
    for _ in range(num):
        # Also for the tensors that stay: move_1d does not change the draws of the others.
        noise = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]
        pairs = zip(noise, weights, strict=True)
        directions.append([_normalized(d.to(w.dtype).to(w.device), w, move_1d) for d, w in pairs])
    return directions


def _normalized(direction: Tensor, weight: Tensor, move_1d: bool) -> Tensor:
    if weight.ndim <= 1 and not move_1d:
        return torch.zeros_like(weight)
    filters = (1, -1) if weight.ndim <= 1 else (len(weight), -1)
    d, w = direction.reshape(filters), weight.reshape(filters)
    ratio = torch.linalg.vector_norm(w, dim=1, keepdim=True) / torch.linalg.vector_norm(d, dim=1, keepdim=True)
    return torch.reshape(d * ratio, weight.shape)


def hessian_directions(objective: Objective, num: int, *, seed: int = 0) -> list[list[Tensor]]:
    """Return the leading eigenvectors of the Hessian, of norm 1, each with its largest component positive."""
    weights = objective.weights()
    top = top_eigenvalues(HessianOperator.of(objective), num, seed=seed)
    columns = [column * column[column.abs().argmax()].sign() for column in top.vectors.unbind(1)]
    return [unflatten(column, weights) for column in columns]
