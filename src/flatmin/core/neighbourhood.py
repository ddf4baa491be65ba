r"""Moves parameters to a point :math:`w + \epsilon` of their neighbourhood, in place, and back to w bit for bit.

The copies of w lie in a few flat buffers, and the perturbation is computed in one flat scratch buffer, chunk by
chunk: a chunk holds many small tensors or one large one. So there are few kernel calls, and the extra memory is one
copy of the parameters, plus one largest tensor (or 256 KiB) for the moment in which :math:`\epsilon` is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatmin.core import perturbation, sharding

MIN_CHUNK = 65_536  # elements: 256 KiB of float32


class AscentNorms(NamedTuple):
    """What an ascent step measured, as scalar tensors on the device."""

    gradient: Tensor
    r"""The dual norm :math:`\lVert g \rVert_q`, joint over all parameters with a radius above 0."""
    perturbation: Tensor
    r"""The norm :math:`\lVert \epsilon \rVert_p`."""


@dataclass
class _Chunk:
    """Some neighbouring tensors of a block, and the scratch memory in which their perturbation is computed."""

    tensors: slice
    flat: slice
    scratch: Tensor
    scratch_views: list[Tensor]

    def load(self, source: list[Tensor]) -> Tensor:
        """Copy the tensors' gradients to the scratch memory and return it, flat."""
        torch._foreach_copy_(self.scratch_views, source[self.tensors])
        return self.scratch


@dataclass
class _Block:
    """The parameters of one group that are alike in device, dtype and sharding."""

    group: int
    parameters: list[Tensor]
    plain: bool  # ordinary dense real tensors, so that nothing has to be unwrapped
    shards: sharding.Shards | None
    zeros: list[Tensor]  # in the parameters' shapes, without memory
    saved: Tensor  # flat
    saved_views: list[Tensor]
    chunks: list[_Chunk]
    direction: Tensor | None = None  # flat: d = eps / T so far, where there are several ascent steps

    def parts(self) -> list[Tensor]:
        """Return the parameters' memory on this rank as dense real tensors."""
        return self.parameters if self.plain else [sharding.local_part(p) for p in self.parameters]

    def gradients(self) -> list[Tensor]:
        """Return the gradients as dense real tensors, 0 where there is none."""
        grads = [p.grad for p in self.parameters]
        return [
            self.zeros[i]
            if grad is None
            else grad
            if self.plain and grad.layout is torch.strided
            else sharding.local_gradient(self.parameters[i], grad)
            for i, grad in enumerate(grads)
        ]

    def add_direction(self, chunk: _Chunk, u: Tensor) -> None:
        """Add a chunk's step to the direction d."""
        if self.direction is None:
            self.direction = torch.zeros_like(self.saved, dtype=u.dtype)
        self.direction[chunk.flat].add_(u)

    def noise(self, generator: torch.Generator) -> list[Tensor]:
        """Return Gaussian noise in place of gradients."""
        dtype = self.chunks[0].scratch.dtype
        return [sharding.local_noise(p, generator, dtype) for p in self.parameters]


class _Ball:
    """The set of perturbations: a radius for each group, the norm, and ASAM's eta."""

    def __init__(self, radii: Sequence[float], p: float, eta: float | None) -> None:
        self.p = p
        self.eta = eta
        self.radius = max(radii)
        self.ratios = [radius / self.radius for radius in radii]
        # Whether T is one number for all parameters that move.
        self.is_round = eta is None and all(ratio in (0, 1) for ratio in self.ratios)

    def scale(self, block: _Block, chunk: _Chunk) -> Tensor | float:
        """Return T relative to the largest radius: the direction does not depend on a common factor."""
        ratio = self.ratios[block.group]
        return ratio if self.eta is None else perturbation.adaptive_scale(block.saved[chunk.flat], ratio, self.eta)


class Neighbourhood:
    """The ball around w: ``save()`` keeps w, ``ascend()`` moves the parameters up, ``restore()`` brings them back."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self._blocks: list[_Block] = []
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
        self._key, self._blocks = [], []
        self.devices = list(dict.fromkeys(p.device for p in parameters))
        alike: dict[Any, list[Tensor]] = {}
        for index, params in moving:
            for p in params:
                if p.requires_grad:
                    kind = (index, p.dtype, p.device, sharding.is_sharded(p), sharding.shards_of(p))
                    alike.setdefault(kind, []).append(p)
        scratch = _Scratch()
        layouts = [_layout(ps) for ps in alike.values()]
        for (_, dtype, device, _, _), layout in zip(alike, layouts, strict=True):
            scratch.reserve(dtype, device, max(stop - start for _, (start, stop) in layout))
        for ((index, dtype, device, _, shards), ps), layout in zip(alike.items(), layouts, strict=True):
            self._blocks.append(_block(index, ps, shards, layout, scratch.buffer(dtype, device)))
        self._scratch = scratch.buffers()
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
        """Bring w back, bit for bit and in place."""
        for block in self._blocks:
            torch._foreach_copy_(block.parts(), block.saved_views)
            block.direction = None

    @torch.no_grad()
    def ascend(
        self,
        radii: Sequence[float],
        *,
        p: float,
        eta: float | None,
        downhill: Sequence[bool],
        noise: torch.Generator | None = None,
        several: bool = False,
    ) -> AscentNorms:
        r"""Take one ascent step from where the parameters stand, with the gradients they have, after ``save()``.

        The first step goes to :math:`w + T \odot d` with :math:`d = dual_p(T \odot g)`; each further one adds the
        step of its own gradient to d and projects d on the unit ball.

        Args:
            radii: rho of each parameter group.
            p: the norm of the ball.
            eta: ASAM's eta, or None for plain SAM.
            downhill: for each group, whether its loss is maximised: its worst neighbour is then the lowest one.
            noise: draw a Gaussian direction from this generator instead of using the gradients.
            several: whether this is one of several steps; d is then kept, which needs another copy.

        Returns:
            The norms of this step's gradient and of the perturbation as it now is.
        """
        if not self._blocks:
            return AscentNorms(torch.zeros(()), torch.zeros(()))
        for scratch in self._scratch:
            scratch.untyped_storage().resize_(scratch.numel() * scratch.element_size())
        try:
            return self._ascend(_Ball(radii, p, eta), downhill, noise, several)
        finally:
            self._free_scratch()

    def _ascend(
        self, ball: _Ball, downhill: Sequence[bool], noise: torch.Generator | None, several: bool
    ) -> AscentNorms:
        q = perturbation.dual_exponent(ball.p) if noise is None else ball.p
        scaled = noise is None and not ball.is_round
        sources = [block.gradients() if noise is None else block.noise(noise) for block in self._blocks]

        rows: list[list[Tensor]] = []
        for block, source in zip(self._blocks, sources, strict=True):
            rows.append([])
            for chunk in block.chunks:
                plain = perturbation.row_(chunk.load(source), q)
                if scaled:
                    u = chunk.load(source).mul_(ball.scale(block, chunk))
                    plain = torch.cat([perturbation.row_(u, q), plain])
                rows[-1].append(plain)
        joint = self._join(rows, q)  # of T * g in front, and of g behind it where that is another
        gradient_norm = perturbation.norm(joint[-2:], q)

        moved: list[list[Tensor]] = []
        for block, source in zip(self._blocks, sources, strict=True):
            here = joint[:2].to(block.saved.device, non_blocking=True)
            make_direction = perturbation.dual if noise is None else perturbation.unit
            to_direction = make_direction(ball.p, here, block.chunks[0].scratch.dtype)
            parts = block.parts()
            moved.append([])
            for chunk in block.chunks:
                u = chunk.load(source)
                scale = ball.scale(block, chunk)
                to_direction(u.mul_(scale) if scaled else u)
                if downhill[block.group]:
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
            return AscentNorms(
                gradient_norm, (gradient_norm.isfinite() & (gradient_norm > 0)).to(joint.dtype) * ball.radius
            )
        return AscentNorms(gradient_norm, perturbation.norm(self._join(moved, ball.p), ball.p))

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
        return sharding.gather_rows(rows, [block.shards for block in self._blocks])

    def _free_scratch(self) -> None:
        # The passes need the memory, and the views stay valid without it.
        for scratch in self._scratch:
            scratch.untyped_storage().resize_(0)


class _Scratch:
    """One scratch buffer for each device and working dtype, as large as its largest chunk."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def reserve(self, dtype: torch.dtype, device: torch.device, size: int) -> None:
        key = (perturbation.working_dtype(dtype.to_real()), device)
        self._sizes[key] = max(size, self._sizes.get(key, 0))

    def buffer(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (perturbation.working_dtype(dtype.to_real()), device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._sizes[key], dtype=key[0], device=device)
        return self._buffers[key]

    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())


Layout = list[tuple[slice, tuple[int, int]]]


def _layout(parameters: Sequence[Tensor]) -> Layout:
    """Cut tensors into chunks no larger than the largest (or MIN_CHUNK): slices of tensors, and their elements."""
    sizes = [sharding.local_part(p).numel() for p in parameters]
    limit = max(MIN_CHUNK, *sizes)
    chunks: Layout = []
    first = start = stop = 0
    for index, size in enumerate(sizes):
        if stop + size - start > limit:
            chunks.append((slice(first, index), (start, stop)))
            first, start = index, stop
        stop += size
    return [*chunks, (slice(first, len(sizes)), (start, stop))]


def _block(
    group: int, parameters: list[Tensor], shards: sharding.Shards | None, layout: Layout, scratch: Tensor
) -> _Block:
    parts = [sharding.local_part(p) for p in parameters]
    saved = torch.empty(layout[-1][1][1], dtype=parts[0].dtype, device=parts[0].device)
    chunks = [
        _Chunk(tensors, slice(start, stop), scratch[: stop - start], _views(scratch, parts[tensors]))
        for tensors, (start, stop) in layout
    ]
    # Stride 0: a missing gradient costs no memory.
    zeros = [saved.new_zeros(()).expand(part.shape) for part in parts]
    plain = not sharding.is_sharded(parameters[0]) and not parameters[0].is_complex()
    return _Block(group, parameters, plain, shards, zeros, saved, _views(saved, parts), chunks)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat buffer, one after the other, in the shapes and memory formats of the given tensors."""
    views, offset = [], 0
    for tensor in like:
        strides = torch.empty_like(tensor, device="meta").stride()  # dense, also where the tensor is not
        views.append(flat.as_strided(tensor.shape, strides, offset))
        offset += tensor.numel()
    return views


def _join_pairs(rows: Tensor, q: float) -> Tensor:
    return torch.cat([perturbation.join(pair, q) for pair in torch.split(rows, 2, dim=1)])


def _move(ball: _Ball, chunk: _Chunk, parts: list[Tensor], scale: Tensor | float) -> Tensor:
    """Add eps = T * d, with d in the chunk's scratch memory, to the parameters, and return it."""
    eps = chunk.scratch.mul_(scale * ball.radius)
    torch._foreach_add_(parts[chunk.tensors], chunk.scratch_views)
    return eps
