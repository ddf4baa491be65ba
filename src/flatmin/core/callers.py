"""Detect callers of SAM.step() that need special handling."""

import sys


def _called_from(module: str, depth: int = 8) -> bool:
    """Return whether a function of a module is among the callers."""
    frame = sys._getframe(2)
    for _ in range(depth):
        if frame.f_globals.get("__name__") == module:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def is_checkpoint_initialization() -> bool:
    """Return whether torch.distributed.checkpoint takes a bare step, at lr 0, to make an optimizer create its state."""
    return _called_from("torch.distributed.checkpoint.state_dict")


def check_not_in_grad_scaler() -> None:
    """Raise if a GradScaler calls ``step(closure)``: it rejects ``closure=`` by itself, but not a positional one."""
    if _called_from("torch.amp.grad_scaler"):
        raise ValueError(
            "scaler.step(opt, closure) would take a step with gradients of the scaled loss: a GradScaler unscales them "
            "before the closure runs. Use two visible passes: scaler.scale(loss).backward(); with opt.perturbed(): "
            "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()."
        )
