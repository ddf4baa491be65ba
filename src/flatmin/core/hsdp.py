"""HSDP: models that FSDP2 shards over the ranks of a group and replicates over several such groups."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatmin.core.dtensor import local_part


def replicated_groups(model: nn.Module | None) -> list[Any]:
    """Return FSDP2's parameter groups whose gradients are averaged over replicas; none without HSDP.

    There is no public way to them. ``set_requires_all_reduce(False)``, which is public, leaves a gradient that has not
    been averaged in no place where it could be read, and adds it to the next one.
    """
    found: dict[int, Any] = {}
    for module in model.modules() if model is not None else ():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
        # Older releases of torch have one group for a module, or None where it has no parameters of its own.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            replicas = getattr(getattr(group, "mesh_info", None), "replicate_process_group", None)
            if replicas is not None and dist.get_world_size(replicas) > 1:
                found[id(group)] = group
    return list(found.values())


def replica_of(model: nn.Module | None) -> int:
    """Return the number of the replica that this rank has a part of."""
    groups = replicated_groups(model)
    return dist.get_rank(groups[0].mesh_info.replicate_process_group) if groups else 0


@contextlib.contextmanager
def within_replicas(groups: Iterable[Any]) -> Iterator[None]:
    """Make backward passes in this context average gradients over the shards of a replica, but not over replicas."""
    meshes = {id(group.mesh_info): group.mesh_info for group in groups}.values()
    saved = [(mesh, mesh.replicate_process_group) for mesh in meshes]
    try:
        for mesh, _ in saved:
            mesh.replicate_process_group = None  # as in FSDP without replicas
        yield
    finally:
        for mesh, replicas in saved:
            mesh.replicate_process_group = replicas


@torch.no_grad()
def average_over_replicas(groups: Iterable[Any]) -> None:
    """Replace the gradients of passes within replicas by what a pass over all of them leaves: one reduction a group."""
    for group in groups:
        grads = [local_part(p.sharded_param.grad) for p in group.fsdp_params if p.sharded_param.grad is not None]
        if not grads:
            continue
        replicas = group.mesh_info.replicate_process_group
        flat = torch.cat([grad.reshape(-1) for grad in grads]).to(group.device)  # where offloaded
        if getattr(group, "gradient_divide_factor", None) is None:  # else the user's factor counts all ranks already
            flat.div_(dist.get_world_size(replicas))
        dist.all_reduce(flat, group=replicas)
        parts: list[Tensor] = list(torch.split(flat, [grad.numel() for grad in grads]))
        torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
