"""How the copies of parameters lie in memory: blocks of parameters that are alike, cut into chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatmin.core import dtensor, perturbation

VectorOf = Callable[[Tensor], Tensor | None]
"""Gives the vector that a parameter is perturbed along: its gradient, or its momentum."""

MIN_CHUNK = 65_536  # elements: 256 KiB of float32


@dataclass
class Chunk:
    """Some neighboring tensors of a block, and the scratch memory in which their perturbation is computed."""

    tensors: slice
    flat: slice
    scratch: Tensor
    scratch_views: list[Tensor]

    def load(self, source: list[Tensor]) -> Tensor:
        """Copy the tensors' gradients to the scratch memory and return it, flat."""
        torch._foreach_copy_(self.scratch_views, source[self.tensors])
        return self.scratch


@dataclass
class Block:
    """The parameters of one group that are alike in device, dtype and sharding."""

    group: int
    parameters: list[Tensor]
    plain: bool  # ordinary dense real tensors: nothing has to be unwrapped
    shards: dtensor.Shards | None
    zeros: list[Tensor]  # in the parameters' shapes, without memory
    saved: Tensor  # flat
    saved_views: list[Tensor]
    chunks: list[Chunk]
    direction: Tensor | None = None  # flat: d = eps / T so far, where there are several ascent steps

    def parts(self) -> list[Tensor]:
        """Return the parameters' memory on this rank as dense real tensors."""
        return self.parameters if self.plain else [dtensor.local_part(p) for p in self.parameters]

    def vectors(self, vector_of: VectorOf) -> list[Tensor]:
        """Return a vector for each parameter (its gradient, say) as dense real tensors, 0 where there is none."""
        grads = [vector_of(p) for p in self.parameters]
        return [
            self.zeros[i]
            if grad is None
            else grad
            if self.plain and grad.layout is torch.strided
            else dtensor.local_gradient(self.parameters[i], grad)
            for i, grad in enumerate(grads)
        ]

    def add_direction(self, chunk: Chunk, u: Tensor) -> None:
        """Add a chunk's step to the direction d."""
        if self.direction is None:
            self.direction = torch.zeros_like(self.saved, dtype=u.dtype)
        self.direction[chunk.flat].add_(u)

    def noise(self, generator: torch.Generator) -> list[Tensor]:
        """Return Gaussian noise in place of gradients."""
        dtype = self.chunks[0].scratch.dtype
        return [dtensor.local_noise(p, generator, dtype) for p in self.parameters]


def lay_out(parameters: Sequence[tuple[int, Tensor]]) -> tuple[list[Block], list[Tensor]]:
    """Return blocks for parameters, given with the index of their group, and the scratch buffers that they share.

    There is one scratch buffer for each device and working dtype, as large as its largest chunk.
    """
    alike: dict[Any, list[Tensor]] = {}
    for index, p in parameters:
        kind = (index, p.dtype, p.device, dtensor.is_sharded(p), dtensor.shards_of(p))
        alike.setdefault(kind, []).append(p)
    layouts = {kind: _layout(ps) for kind, ps in alike.items()}
    sizes: dict[Any, int] = {}
    for kind, layout in layouts.items():
        largest = max(stop - start for _, (start, stop) in layout)
        sizes[_scratch_key(kind)] = max(largest, sizes.get(_scratch_key(kind), 0))
    scratch = {key: torch.empty(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    blocks = [_block(kind[0], ps, kind[-1], layouts[kind], scratch[_scratch_key(kind)]) for kind, ps in alike.items()]
    return blocks, list(scratch.values())


def _scratch_key(kind: Any) -> tuple[torch.dtype, torch.device]:
    _, dtype, device, *_ = kind
    return perturbation.working_dtype(dtype.to_real()), device


Layout = list[tuple[slice, tuple[int, int]]]


def _layout(parameters: Sequence[Tensor]) -> Layout:
    """Cut tensors into chunks no larger than the largest (or MIN_CHUNK): slices of tensors, and their elements."""
    sizes = [dtensor.local_part(p).numel() for p in parameters]
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
    group: int, parameters: list[Tensor], shards: dtensor.Shards | None, layout: Layout, scratch: Tensor
) -> Block:
    parts = [dtensor.local_part(p) for p in parameters]
    saved = torch.empty(layout[-1][1][1], dtype=parts[0].dtype, device=parts[0].device)
    chunks = [
        Chunk(tensors, slice(start, stop), scratch[: stop - start], _views(scratch, parts[tensors]))
        for tensors, (start, stop) in layout
    ]
    # Stride 0: a missing gradient costs no memory.
    zeros = [saved.new_zeros(()).expand(part.shape) for part in parts]
    plain = not dtensor.is_sharded(parameters[0]) and not parameters[0].is_complex()
    return Block(group, parameters, plain, shards, zeros, saved, _views(saved, parts), chunks)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat buffer, one after the other, in the shapes and memory formats of the given tensors."""
    views, offset = [], 0
    for tensor in like:
        strides = torch.empty_like(tensor, device="meta").stride()  # dense, also where the tensor is not
        views.append(flat.as_strided(tensor.shape, strides, offset))
        offset += tensor.numel()
    return views
