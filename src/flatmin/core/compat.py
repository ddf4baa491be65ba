"""What depends on how torch is built: differences between its releases, and callers of SAM that need special handling.

Of differences, the docstrings say with which release each can go.
"""

import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CHECKPOINT = "torch.distributed.checkpoint.state_dict"
NUM_CALLERS = 8


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


def _caller(module: str) -> FrameType | None:
    """Return the innermost function of a module among the last callers, if there is one."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(NUM_CALLERS):
        if frame is None or frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None


def is_checkpoint() -> bool:
    """Return whether torch.distributed.checkpoint calls: for the state, or a bare step at lr 0 that creates it."""
    return _caller(CHECKPOINT) is not None


def flattens_optimizer_state() -> bool:
    """Return whether it was asked for an optimizer state dict with one entry per parameter and value."""
    frame = _caller(CHECKPOINT)
    info = None if frame is None else frame.f_locals.get("info")
    return bool(getattr(info, "flatten_optimizer_state_dict", False))


def is_unscaling(depth: int) -> bool:
    """Return whether the function so many calls above is where a GradScaler reads the groups to unscale gradients."""
    return sys._getframe(depth + 1).f_code.co_name == "_unscale_grads_"


def check_not_in_grad_scaler() -> None:
    """Raise if a GradScaler calls ``step(closure)``: it rejects ``closure=`` by itself, but not a positional one."""
    if _caller("torch.amp.grad_scaler") is not None:
        raise ValueError(
            "scaler.step(opt, closure) would take a step with gradients of the scaled loss: a GradScaler unscales them "
            "before the closure runs. Use two visible passes: scaler.scale(loss).backward(); with opt.perturbed(): "
            "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()."
        )
