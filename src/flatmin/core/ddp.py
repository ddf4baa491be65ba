"""Data-parallel workers (DDP, HSDP): which passes reduce gradients, and one reduction instead of many."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatmin.core.dtensor import is_sharded, local_part

BUCKET_BYTES = 25 * 1024 * 1024  # as large as DistributedDataParallel's


def unwrap(model: nn.Module | None) -> Any:
    """Return what torch.compile wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def check_model(model: nn.Module | None, parameters: Iterable[Tensor], sync_perturbation: bool) -> None:
    """Raise for the ways of parallel training that SAM cannot work in."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or None, got {type(model).__name__}.")
    parameters = list(parameters)
    modules = list(model.modules()) if model is not None else []
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in modules) or any(
        type(p).__name__ == "FlatParameter" for p in parameters
    ):
        raise ValueError(
            "model is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters SAM cannot perturb safely. "
            "Shard it with FSDP2 instead: torch.distributed.fsdp.fully_shard(model)."
        )
    own = {id(p) for m in modules for p in m.parameters(recurse=False)}
    if own and own.isdisjoint(map(id, parameters)):
        warnings.warn(
            "model has none of the parameters of the optimizer: SAM would look after the running statistics of another "
            "model. Pass the model that is trained, as you call it.",
            UserWarning,
            stacklevel=4,
        )
    if getattr(unwrap(model), "static_graph", False) and not sync_perturbation:
        raise ValueError(
            "model is DistributedDataParallel(static_graph=True), which cannot begin inside no_sync(), as a "
            "perturbation for each worker needs. Build it without static_graph, or pass sync_perturbation=True."
        )


def is_parallel() -> bool:
    """Return whether there are several workers."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def has_no_sync(model: nn.Module | None) -> bool:
    """Return whether there are several workers and the model can keep a pass on its own, as DDP can."""
    return is_parallel() and hasattr(unwrap(model), "no_sync")


def local_pass(model: nn.Module | None) -> AbstractContextManager[Any]:
    """Return a context in which passes leave gradients on their worker (DDP) or within their replica (HSDP)."""
    no_sync = getattr(unwrap(model), "no_sync", None)
    if no_sync is not None:
        return no_sync()  # type: ignore[no-any-return]
    groups = replicated_groups(model)
    return within_replicas(groups) if groups else contextlib.nullcontext()


def reduce_gradients(parameters: Iterable[Tensor], model: nn.Module | None) -> None:
    """Average the gradients of local passes over the workers or replicas."""
    if has_no_sync(model):
        average_gradients(parameters, model)
    elif is_parallel():
        average_over_replicas(replicated_groups(model))


def warn_if_passes_cannot_be_local(model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
    """Warn where there are several workers and SAM cannot tell whether the first pass reduces gradients."""
    if is_parallel() and not hasattr(unwrap(model), "no_sync") and not any(is_sharded(p) for p in parameters):
        warnings.warn(
            "There are several workers, but SAM's model "
            + ("is not given" if model is None else f"({type(model).__name__}) has no no_sync()")
            + ", so it cannot keep the first pass on its worker: the perturbation is shared if your wrapper "
            "reduces gradients in every backward pass, and gradients are then reduced twice per step. Pass the "
            "DistributedDataParallel module as model=, or sync_perturbation=True if a shared one is what you want.",
            UserWarning,
            stacklevel=5,
        )


def average_gradients(parameters: Iterable[Tensor], model: nn.Module | None) -> None:
    """Replace each gradient by its mean over the workers, in buckets, as DistributedDataParallel would.

    A gradient that is missing on some workers counts as 0 there. One that is missing on all of them stays missing where
    the model was built with ``find_unused_parameters``, at the price of the same look at the device that DDP takes.
    """
    wrapped = unwrap(model)
    group = getattr(wrapped, "process_group", None)
    # As after a pass that reduced gradients: the next forward pass shares the buffers of rank 0.
    wrapped.require_forward_param_sync = True
    trainable = [p for p in parameters if p.requires_grad]
    if any(p.grad is not None and p.grad.layout != torch.strided for p in trainable):
        raise ValueError(
            "A list of closures under DistributedDataParallel cannot reduce sparse gradients. "
            "Build the layer with sparse=False, or take one closure a step."
        )
    if getattr(wrapped, "find_unused_parameters", False):
        used = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
        dist.all_reduce(used, group=group)
        trainable = [p for p, count in zip(trainable, used.tolist(), strict=True) if count]
    for bucket in _buckets(trainable):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.reshape(-1) for g in grads]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for p, mean in zip(bucket, torch.split(flat, [g.numel() for g in grads]), strict=True):
            p.grad = torch.empty_like(p).copy_(mean.view(p.shape))


def _buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    latest: dict[Any, tuple[list[Tensor], int]] = {}
    for p in parameters:
        size = p.numel() * p.element_size()
        bucket, filled = latest.get((p.dtype, p.device), ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(p)
        latest[(p.dtype, p.device)] = (bucket, filled + size)
    return buckets


@torch.no_grad()
def forget_gathered_weights(model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
    """Make FSDP2 gather the weights anew, because the shards have moved.

    It keeps them after a forward pass without a backward one, or with ``set_reshard_after_backward(False)``.
    """
    if model is not None and dist.is_available() and dist.is_initialized() and any(map(is_sharded, parameters)):
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state"):
                module.reshard()  # type: ignore[operator]


# HSDP: models that FSDP2 shards over the ranks of a group and replicates over several such groups.


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
