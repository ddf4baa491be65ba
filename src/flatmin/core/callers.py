"""Detect callers of SAM.step() that need special handling."""

import sys
from types import FrameType

CHECKPOINT = "torch.distributed.checkpoint.state_dict"


def _caller(module: str, depth: int = 8) -> FrameType | None:
    """Return the innermost function of a module among the callers, if there is one."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(depth):
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


def check_not_in_grad_scaler() -> None:
    """Raise if a GradScaler calls ``step(closure)``: it rejects ``closure=`` by itself, but not a positional one."""
    if _caller("torch.amp.grad_scaler") is not None:
        raise ValueError(
            "scaler.step(opt, closure) would take a step with gradients of the scaled loss: a GradScaler unscales them "
            "before the closure runs. Use two visible passes: scaler.scale(loss).backward(); with opt.perturbed(): "
            "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()."
        )
