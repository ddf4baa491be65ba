"""What SAM has to know of sharded parameters (DTensor: FSDP2, tensor parallelism): local parts and joint norms."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from flatmin.core.compat import all_gather_single, shard_of_same_tensor

Shards = tuple[Any, tuple[int, ...]]
"""A device mesh, and the dimensions of it over which a tensor is split."""


def is_sharded(tensor: object) -> TypeGuard[Any]:
    """Return whether it is a DTensor, without importing torch.distributed.tensor where nobody else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shards_of(parameter: Tensor) -> Shards | None:
    """Return over what a parameter is split, or None for one that is whole on every rank."""
    if not is_sharded(parameter):
        return None
    dims = tuple(dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return (parameter.device_mesh, dims) if dims else None


def local_part(tensor: Tensor) -> Tensor:
    """Return the real, dense part of a tensor that lies on this rank, sharing its memory where it has any.

    Complex numbers become pairs of real ones; sparse tensors are made dense, which copies.
    """
    if is_sharded(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
        wait = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor
        tensor = wait() if wait is not None else tensor
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def local_gradient(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient's part that belongs to the parameter's local part."""
    if is_sharded(grad) and is_sharded(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local_part(grad)


def local_noise(parameter: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of Gaussian noise for a parameter: the same noise however it is split.

    Every rank draws the whole tensor, from generators in the same state, and keeps its own part.
    """
    shape = (*parameter.shape, 2) if parameter.is_complex() else parameter.shape
    noise = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device).to(parameter.device)
    if not is_sharded(parameter):
        return noise
    return shard_of_same_tensor(noise, parameter.device_mesh, parameter.placements)


def gather_rows(rows: Sequence[Tensor], shards: Sequence[Shards | None]) -> Tensor:
    """Return the rows of all parts as a matrix: one collective for each way in which tensors are split.

    With FSDP2 that is one small all-gather a step, however many tensors there are. A row of a tensor that is whole
    on each rank is taken once.
    """
    device = rows[0].device
    dtype = functools.reduce(torch.promote_types, (r.dtype for r in rows))
    gathered: list[Tensor] = []
    for way in dict.fromkeys(shards):
        part = torch.stack(
            [r.to(device, dtype, non_blocking=True) for r, s in zip(rows, shards, strict=True) if s == way]
        )
        for dim in way[1] if way is not None else ():
            group = way[0].get_group(dim)  # type: ignore[index]
            whole = part.new_empty((dist.get_world_size(group) * len(part), part.shape[1]))
            all_gather_single(whole, part.contiguous(), group)
            part = whole
        gathered.append(part)
    return gathered[0] if len(gathered) == 1 else torch.cat(gathered)
