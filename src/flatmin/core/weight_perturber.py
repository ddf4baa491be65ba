r"""Moves parameters to a point :math:`w + \epsilon` of their neighborhood, in place, and back to w exactly.

The copies of w lie in a few flat buffers, and the perturbation is computed in one flat scratch buffer, chunk by
chunk: a chunk holds many small tensors or one large one. So there are few kernel calls, and the extra memory is one
copy of the parameters, plus one largest tensor (or 256 KiB) for the moment in which :math:`\epsilon` is computed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from flatmin.core import dtensor, perturbation
from flatmin.core.flat_buffers import Block, Chunk, VectorOf, lay_out


class AscentNorms(NamedTuple):
    """What an ascent step measured, as scalar tensors on the device."""

    gradient: Tensor
    r"""The dual norm :math:`\lVert g \rVert_q`, joint over all parameters with a radius above 0."""
    perturbation: Tensor
    r"""The norm :math:`\lVert \epsilon \rVert_p`."""
    scaled_gradient: Tensor
    r""":math:`\lVert T \odot g \rVert_q` with T relative to the largest radius: times that, it is the first-order rise
    :math:`g \cdot \epsilon` of one ascent step."""


class _Ball:
    """The set of perturbations: a radius for each group, the norm, and ASAM's eta."""

    def __init__(self, radii: Sequence[float], p: float, eta: float | None) -> None:
        self.p = p
        self.eta = eta
        self.radius = max(radii)
        self.ratios = [radius / self.radius for radius in radii]
        # Whether T is one number for all parameters that move.
        self.is_round = eta is None and all(ratio in (0, 1) for ratio in self.ratios)

    def scale(self, block: Block, chunk: Chunk) -> Tensor | float:
        """Return T relative to the largest radius: the direction does not depend on a common factor."""
        ratio = self.ratios[block.group]
        return ratio if self.eta is None else perturbation.adaptive_scale(block.saved[chunk.flat], ratio, self.eta)


class WeightPerturber:
    """The ball around w: ``save()`` keeps w, ``ascend()`` moves the parameters up, ``restore()`` brings them back."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._scratch: list[Tensor] = []
        self._key: list[Any] = []

    def prepare(self, groups: Sequence[dict[str, Any]], radii: Sequence[float]) -> None:
        """Lay out the buffers for the parameters that are to move, if anything has changed since the last time."""
        moving = [(index, group["params"]) for index, group in enumerate(groups) if radii[index] > 0]
        parameters = [p for _, params in moving for p in params if p.requires_grad]
        # The identity of a parameter is not enough: `model.double()` keeps the object and changes its dtype. Lists
        # of one attribute each, because this is looked at in every step.
        key = [
            [(index, len(params)) for index, params in moving],
            [id(p) for p in parameters],
            [p.dtype for p in parameters],
            [p.device for p in parameters],
        ]
        if key == self._key:
            return
        self._key, self._blocks, self._scratch = [], [], []
        # Once each: torch only warns of a parameter that is twice in a group.
        pairs = [(index, p) for index, params in moving for p in dict.fromkeys(params) if p.requires_grad]
        self._blocks, self._scratch = lay_out(pairs)
        self._free_scratch()
        self._key = key

    @torch.no_grad()
    def save(self) -> None:
        """Keep a copy of w."""
        for block in self._blocks:
            torch._foreach_copy_(block.saved_views, block.parts())
            block.direction = None

    @torch.no_grad()
    def restore(self) -> None:
        """Bring w back, exactly and in place."""
        for block in self._blocks:
            torch._foreach_copy_(block.parts(), block.saved_views)
            block.direction = None
        _forget_casts()

    @torch.no_grad()
    def ascend(
        self,
        radii: Sequence[float],
        *,
        p: float,
        eta: float | None,
        maximize: Sequence[bool],
        vector_of: VectorOf,
        noise: torch.Generator | None = None,
        several: bool = False,
    ) -> AscentNorms:
        r"""Take one ascent step from where the parameters stand, along their gradients, after ``save()``.

        The first step goes to :math:`w + T \odot d` with :math:`d = dual_p(T \odot g)`; each further one adds the
        step of its own gradient to d and projects d on the unit ball. ``vector_of`` gives g, the gradient as a rule;
        with ``noise`` a Gaussian direction takes its place. Where a group's loss is maximized (``maximize``), the worst
        neighbor is the lowest one. ``several`` keeps d for further steps, which needs another copy.
        """
        if not self._blocks:
            return AscentNorms(torch.zeros(()), torch.zeros(()), torch.zeros(()))
        for scratch in self._scratch:
            scratch.untyped_storage().resize_(scratch.numel() * scratch.element_size())
        try:
            return self._ascend(_Ball(radii, p, eta), maximize, vector_of, noise, several)
        finally:
            self._free_scratch()
            _forget_casts()

    @torch.no_grad()
    def first_order_rise(self, gradient_of: VectorOf) -> Tensor:
        r"""Return :math:`g \cdot \epsilon` for the perturbation as it now is."""
        rows = []
        for block in self._blocks:
            dtype, grads = block.chunks[0].scratch.dtype, block.vectors(gradient_of)
            moved = zip(block.parts(), block.saved_views, grads, strict=True)
            rises = [((part.to(dtype) - saved.to(dtype)) * grad.to(dtype)).sum() for part, saved, grad in moved]
            rows.append(torch.stack(rises).sum()[None])
        return self._gather(rows).sum()

    def _ascend(
        self,
        ball: _Ball,
        maximize: Sequence[bool],
        vector_of: VectorOf,
        noise: torch.Generator | None,
        several: bool,
    ) -> AscentNorms:
        q = perturbation.dual_exponent(ball.p) if noise is None else ball.p
        scaled = noise is None and not ball.is_round
        sources = [block.vectors(vector_of) if noise is None else block.noise(noise) for block in self._blocks]

        rows: list[list[Tensor]] = []
        for block, source in zip(self._blocks, sources, strict=True):
            rows.append([])
            for chunk in block.chunks:
                plain = perturbation.row_(chunk.load(source), q)
                if scaled:
                    u = chunk.load(source).mul_(ball.scale(block, chunk))
                    plain = torch.cat([perturbation.row_(u, q), plain])
                rows[-1].append(plain)
        joint = self._join(rows, q)
        of_scaled, of_gradient = joint[:2], joint[-2:]  # the same row if T is one number
        gradient_norm = perturbation.norm(of_gradient, q)
        scaled_norm = perturbation.norm(of_scaled, q) if scaled else gradient_norm

        moved: list[list[Tensor]] = []
        for block, source in zip(self._blocks, sources, strict=True):
            here = of_scaled.to(block.saved.device, non_blocking=True)
            make_direction = perturbation.dual if noise is None else perturbation.unit
            to_direction = make_direction(ball.p, here, block.chunks[0].scratch.dtype)
            parts = block.parts()
            moved.append([])
            for chunk in block.chunks:
                u = chunk.load(source)
                scale = ball.scale(block, chunk)
                to_direction(u.mul_(scale) if scaled else u)
                if maximize[block.group]:
                    u.neg_()
                if several:
                    block.add_direction(chunk, u)
                    continue
                eps = _move(ball, chunk, parts, scale)
                if not ball.is_round:
                    moved[-1].append(perturbation.row_(eps, ball.p))
        if several:
            moved = self._move_to_projection(ball)
        elif ball.is_round:
            moves = gradient_norm.isfinite() & (gradient_norm > 0)
            return AscentNorms(gradient_norm, moves.to(joint.dtype) * ball.radius, scaled_norm)
        return AscentNorms(gradient_norm, perturbation.norm(self._join(moved, ball.p), ball.p), scaled_norm)

    def _move_to_projection(self, ball: _Ball) -> list[list[Tensor]]:
        directions = [block.direction for block in self._blocks if block.direction is not None]
        perturbation.project_(directions, ball.p, gather=self._gather)
        moved: list[list[Tensor]] = []
        for block, direction in zip(self._blocks, directions, strict=True):
            parts = block.parts()
            torch._foreach_copy_(parts, block.saved_views)
            moved.append([])
            for chunk in block.chunks:
                chunk.scratch.copy_(direction[chunk.flat])
                eps = _move(ball, chunk, parts, ball.scale(block, chunk))
                moved[-1].append(perturbation.row_(eps, ball.p))
        return moved

    def _join(self, rows: Sequence[Sequence[Tensor]], q: float) -> Tensor:
        """Merge the rows of all chunks of all blocks of all ranks. Rows side by side are merged side by side."""
        # One row a block first: shards of different sizes have different numbers of chunks.
        table = self._gather([_join_pairs(torch.stack(list(of_block)), q) for of_block in rows])
        return table[0] if len(table) == 1 else _join_pairs(table, q)

    def _gather(self, rows: Sequence[Tensor]) -> Tensor:
        return dtensor.gather_rows(rows, [block.shards for block in self._blocks])

    def _free_scratch(self) -> None:
        # The passes need the memory, and the views stay valid without it.
        for scratch in self._scratch:
            scratch.untyped_storage().resize_(0)


def _forget_casts() -> None:
    """Make what is computed of the weights once be computed anew: casts of autocast, and cached parametrizations."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def _join_pairs(rows: Tensor, q: float) -> Tensor:
    return torch.cat([perturbation.join(pair, q) for pair in torch.split(rows, 2, dim=1)])


def _move(ball: _Ball, chunk: Chunk, parts: list[Tensor], scale: Tensor | float) -> Tensor:
    """Add eps = T * d, with d in the chunk's scratch memory, to the parameters, and return it."""
    eps = chunk.scratch.mul_(scale * ball.radius)
    torch._foreach_add_(parts[chunk.tensors], chunk.scratch_views)
    return eps
