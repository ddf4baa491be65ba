"""What differs between the releases of torch that flatmin supports, and the release from which each line can go."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def all_gather_single(output: Tensor, tensor: Tensor, group: Any) -> None:
    """Gather the tensors of all ranks into one. Remove when torch 2.12 support ends."""
    gather = dist.all_gather_single if TORCH >= (2, 13) else dist.all_gather_into_tensor
    gather(output, tensor, group=group)


def shard_of_same_tensor(tensor: Tensor, mesh: Any, placements: Any) -> Tensor:
    """Return this rank's part of a tensor that all ranks have. Remove the second half when torch 2.6 support ends.

    There, ``distribute_tensor`` sends the tensor of rank 0, also to replicas that have their own.
    """
    from torch.distributed.tensor import distribute_tensor

    if TORCH >= (2, 7):
        shard: Tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
        return shard
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            tensor = placement._shard_tensor(tensor, mesh, dim)
    return tensor


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks on saved tensors are active, as in checkpointing. Remove when torch 2.6 support ends.

    There, disabling hooks raises an error if some are active. Whether they are *allowed* is another question.
    """
    if TORCH >= (2, 7):
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    try:
        torch._C._autograd._saved_tensors_hooks_disable("")
    except RuntimeError:
        return True
    finally:
        torch._C._autograd._saved_tensors_hooks_enable()
    return False
